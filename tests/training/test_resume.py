"""A resume with other settings: what is shown, what is refused, and what batch and learning rate become."""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from stormo.config import options, toml
from stormo.config.layout import resolve_layout
from stormo.config.link import CANDIDATES, Link
from stormo.config.plan import Facts, Plan, resolve
from stormo.config.schema import SECTIONS, ResolvedBatch
from stormo.errors import SettingError
from stormo.tasks.find import find_task
from stormo.training.resume import REFUSED, SHOWN
from stormo.training.settings import read_settings

TASK = Path(__file__).parents[1] / "tiny_task.py"
FACTS = Facts(num_train=6400, num_validation=100, train_bytes=1000, data_sha256="a1")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _planned(words: str, num_workers: int, facts: Facts = FACTS) -> Plan:
    """The plan of a command, with its settings written into the run's folder as the run itself does it."""
    config, task_class = read_settings([*words.split(), "--device", "cpu", "--num-gpus", str(num_workers)])
    plan = resolve(config, resolve_layout(config, ()), facts)
    folder = Path("runs") / str(config.run.run_name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(toml.to_toml(config, plan.initial), encoding="utf-8")
    assert task_class.name == "tiny"
    return plan


def _begin(*words: str, num_workers: int = 2) -> Plan:
    return _planned(" ".join([str(TASK), "--run-name old", *words]), num_workers)


def _resume(words: str = "", num_workers: int = 2, **more: Any) -> Plan:
    return _planned(f"--resume old {words}", num_workers, **more)


def _said(plan: Plan, label: str) -> str | None:
    return dict(plan.explanation).get(label)


@pytest.mark.parametrize(
    ("words", "rate", "start", "text"),
    [
        ("--base-lr 0.1", 0.2, 0.1, "0.2 = 0.1 × 2 (linear); 0.4 before; warm-up from 0.1 "),
        ("--lr-rule none", 0.2, 0.1, "0.2 as set for any batch (the batch is 2 × one worker's); 0.4 before; "),
        ("--base-batch-size 16", 0.8, 0.2, "0.8 = 0.2 × 4 (linear: 64 samples against 16); 0.4 before; "),
        ("--warmup-from 0.25", 0.4, 0.1, "0.4 as before; warm-up from 0.1 over "),
        ("--beta2 0.9", 0.4, 0.2, "0.4 as before; warm-up from 0.2 over "),
    ],
)
def test_another_learning_rate_leaves_the_batch_alone_whatever_the_workers(
    words: str, rate: float, start: float, text: str
) -> None:
    _begin("--batch-size 32 --base-lr 0.2 --optimizer adamw")
    for num_workers in (1, 2, 3):
        plan = _planned(f"--resume old {words}", num_workers)
        assert (plan.global_batch_size, plan.learning_rate, plan.warmup_start) == (64, rate, start)
        assert str(_said(plan, "learning rate")).startswith(text)
        assert str(_said(plan, "changed")).startswith(words)
        _begin("--batch-size 32 --base-lr 0.2 --optimizer adamw")
    _resume(words, num_workers=1)
    again = _resume(num_workers=3)
    assert (again.global_batch_size, again.learning_rate, again.warmup_start) == (64, rate, start)
    assert _said(again, "changed") is None  # it is the run's own now


def test_a_warm_up_that_is_set_later_starts_where_it_would_have_started() -> None:
    assert _begin("--warmup-epochs 0 --base-lr 0.2").warmup_start == 0.4
    assert _resume("--warmup-epochs 3", num_workers=1).warmup_start == 0.2


def test_another_batch_is_reckoned_as_that_of_a_new_run_on_the_same_data() -> None:
    _begin("--batch-size 32 --base-lr 0.2")
    plan = _resume("--batch-size 16", num_workers=3)
    assert (plan.global_batch_size, plan.initial.num_workers) == (48, 3)
    assert _said(plan, "global batch") == "48 = 16 per worker × 3 workers × 1 accumulation; 64 before"
    assert str(_said(plan, "learning rate")).startswith("0.6 = 0.2 × 3 (linear); 0.4 before; ")
    with pytest.raises(SettingError, match="trained on data of SHA-256 a1 was to resume, but the data here"):
        _resume("--batch-size 8", facts=replace(FACTS, data_sha256="b2"))


def test_a_batch_of_all_workers_is_not_changed_by_that_of_one() -> None:
    _begin("--global-batch-size 64")
    with pytest.raises(SettingError) as refused:
        _resume("--batch-size 32", num_workers=1)
    assert str(refused.value) == (
        "--batch-size 32 was set for a run whose global batch is 64, but 32 per worker × 1 worker × 1 accumulation "
        "makes 32; set --accumulate, or --global-batch-size to change the batch."
    )
    both = _resume("--batch-size 32 --global-batch-size 64", num_workers=1)  # as a restarted job may say it
    assert (both.global_batch_size, _said(both, "changed")) == (64, None)


def test_micro_batches_that_the_user_changes_are_as_large_as_that_makes_them_from_then_on() -> None:
    _begin("--batch-size 32 --accumulate 2")
    assert _resume(num_workers=1).accumulate == 4  # no micro-batch larger than at the start
    plan = _resume("--accumulate 1", num_workers=1)
    assert (plan.global_batch_size, plan.accumulate, _said(plan, "changed")) == (128, 1, "--accumulate 1 (2 before)")
    again = _resume(num_workers=1)
    assert (again.accumulate, again.initial.num_workers, again.initial.micro_batch_size) == (1, 2, 128)


def test_fewer_workers_take_a_batch_of_one_sample_for_each_of_those_before() -> None:
    _begin("--global-batch-size 3", num_workers=3)
    assert _resume(num_workers=2).accumulate == 1  # 2 + 1: a second micro-batch would lack a sample


def test_a_learning_rate_rests_on_the_batch_at_the_start_also_after_a_search() -> None:
    _begin("--batch-size 128 --base-lr 0.2")
    assert _resume("--batch-size auto").learning_rate == 0.4
    again = _resume("--base-lr 0.1")
    assert (again.global_batch_size, again.learning_rate) == (256, 0.2)


def test_one_line_says_all_that_is_changed() -> None:
    _begin("--optimizer lamb --deterministic")
    plan = _resume("--eps 1e-05 --no-deterministic --clip-norm 2 --beta2 0.999")  # the last is lamb's own default
    assert plan.explanation[0] == (
        "changed",
        "--eps 1e-05 (1e-06 before), --no-deterministic (on before), --clip-norm 2.0 (not set before)",
    )


@pytest.mark.parametrize(("begun", "words"), [("", "--precision fp64"), ("--precision fp64", "--precision fp32")])
def test_weights_keep_their_type(begun: str, words: str) -> None:
    _begin(begun)
    with pytest.raises(SettingError, match=f"{words} was set with --resume, .* fp64 gives the weights another type; "):
        _resume(words)


def test_a_task_is_the_same_by_any_path_to_its_file() -> None:
    _begin()
    other = Path(os.path.relpath(TASK))
    assert read_settings([str(other), "--resume", "old"])[0].task == str(other)
    copy = Path("another_task.py")
    # It has none of the options that the run's file holds.
    copy.write_text("import stormo\n\nclass Another(stormo.Task): ...\n", encoding="utf-8")
    with pytest.raises(
        SettingError, match=r"task another_task.py was set with --resume, but run old .* is another run; leave "
    ):
        read_settings(["another_task.py", "--resume", "old"])


def test_a_task_that_was_not_clipped_is_reported_so_whatever_its_defaults_are_by_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _begin()
    _, task_class = read_settings([str(TASK)])
    later = type("Tiny", (task_class,), {"defaults": {"clip_norm": 1.0}})
    monkeypatch.setattr("stormo.training.settings.find_task", lambda name: later)
    (change,) = read_settings(["--resume", "old", "--clip-norm", "1"])[0].changed
    assert str(change) == "--clip-norm 1.0 (not set before)"


def test_a_run_resumes_in_its_own_folder_however_it_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _begin()
    place = (tmp_path / "runs").resolve()
    Path("link").symlink_to(tmp_path / "runs" / "old")
    for words in (["--resume", "link"], ["--resume", "old", "--runs-folder", str(place)]):
        run = read_settings(words)[0].run
        assert (run.run_name, Path(run.runs_folder).resolve()) == ("old", place)
    with pytest.raises(SettingError) as refused:
        read_settings(["--resume", "runs/old", "--runs-folder", "others"])
    assert str(refused.value) == (
        "--runs-folder others was set with --resume, but the run to resume lies in runs; leave one of them out."
    )
    monkeypatch.chdir("runs/old")
    run = read_settings(["--resume", "."])[0].run
    assert (run.run_name, Path(run.runs_folder)) == ("old", place)


@pytest.mark.parametrize(
    ("words", "strategy", "changed"),
    [
        ("", "2 of them, which step a shard of the weights each; at most 2 steps ahead", None),
        ("--strategy server", "2 of them, which step a shard of the weights each; at most 2 steps ahead", None),
        ("--strategy server --servers 1", "one of them, which steps; at most 2 steps ahead", None),
        ("--staleness 0", "2 of them, which step a shard of the weights each; synchronous", "--staleness 0 (2 before)"),
        ("--strategy ddp", "ddp: as set", "--strategy ddp (server before), --staleness 0 (2 before)"),
        ("--mesh shard=2", "mesh: shard=2, as set", "--mesh shard=2 (not set before), --staleness 0 (2 before)"),
    ],
)
def test_servers_stay_as_they_were_and_the_end_of_stale_ones_is_shown(
    words: str, strategy: str, changed: str | None
) -> None:
    _begin("--strategy server --servers 2 --staleness 2")
    plan = _resume(words)
    assert strategy in (_said(plan, "strategy") or "")
    assert _said(plan, "changed") == changed


@pytest.mark.parametrize(
    ("words", "compression", "changed"),
    [
        ("", "two matrices of rank 2", None),
        ("--strategy ddp --compress powersgd", "two matrices of rank 2", None),
        ("--compress bf16", "gradients are sent as bf16", "--compress bf16 (powersgd before)"),
        ("--compress none", None, "--compress none (powersgd before)"),
        ("--strategy fsdp", None, "--strategy fsdp (auto before), --compress none (powersgd before)"),
        ("--mesh replicate=2", "two matrices of rank 2", None),
    ],
)
def test_gradients_travel_as_they_did_and_another_way_is_shown(
    words: str, compression: str | None, changed: str | None
) -> None:
    _begin("--compress powersgd --compress-rank 2")
    plan = _resume(words)
    said = _said(plan, "compression")
    assert said is None if compression is None else (said or "").startswith(compression)
    assert _said(plan, "changed") == changed


# --- the tables: each setting has one row, does what its row says, and is in the documents --------------------------

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"
EVERY = options.train_options()
# Taken without a word: a new setting belongs here, or into one of the package's two tables.
FREE = frozenset(
    (
        # where it runs
        *("num_gpus", "num_nodes", "max_restarts", "launcher", "hosts", "hostfile", "print_commands", "node_id"),
        *("master_addr", "master_port", "device", "backend", "timeout", "strategy", "servers", "mesh", "zero"),
        *("tune_link", "bind"),
        # how it gets there: the same result but for rounding
        *("compile", "graph", "channels_last", "autotune", "loader", "loader_workers", "validation_batch_size"),
        *("checkpoint_activations", "offload", "shard_modules", "schedule"),
        # when it ends
        *("target_accuracy", "target_loss", "patience"),
        # what it leaves behind and shows
        *("resume", "checkpoint_every", "keep_checkpoints", "async_checkpoint"),
        *("tensorboard", "mlflow", "wandb", "sinks", "prometheus", "prometheus_host", "noise_scale"),
        *("energy", "grid_intensity", "energy_price", "currency"),
        # what one call does
        *("config", "dry_run", "plot_schedule", "preflight", "stage", "keep_staged", "profile", "verbose"),
    )
)
_PLACE = ("run_name", "runs_folder", "resume", "config")  # they say which run, and what is read besides it


def test_every_setting_has_one_row() -> None:
    declared = {field.name for section in SECTIONS.values() for field in dataclasses.fields(section)}
    rows = [*REFUSED, *SHOWN, *FREE]
    assert len(rows) == len(set(rows))
    assert set(rows) == declared | {"task"}


def _another(one: options.Option) -> Any:
    """A value that is not the default."""
    if one.choices:
        return next(choice for choice in one.choices if choice != one.default)
    if one.kind is bool:
        return not one.default
    return {int: (one.default or 0) + 1 if one.kind is int else 0, float: 0.125, str: "text"}[one.kind]


def _words(one: options.Option, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [one.flag if value else one.flag.replace("--", "--no-", 1)]
    return [one.flag, str(value)]


@pytest.fixture
def old_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run named old, all by default, in the runs of the working folder."""
    monkeypatch.chdir(tmp_path)
    config = options.make_config({}, find_task("fashion-mnist").Options)
    effect = ResolvedBatch(
        global_batch_size=64, learning_rate=0.02, warmup_start=0.01, num_workers=2, micro_batch_size=32
    )
    run = tmp_path / "runs" / "old"
    run.mkdir(parents=True)
    (run / "config.toml").write_text(toml.to_toml(config, effect), encoding="utf-8")
    return run


def test_every_setting_does_what_its_row_says(old_run: Path) -> None:
    for one in EVERY:
        if one.name in _PLACE:
            continue
        value = _another(one)
        words = ["--resume", "old", *_words(one, value)]
        if one.name in REFUSED:
            with pytest.raises(SettingError) as refused:
                read_settings(words)
            said = f"{' '.join(_words(one, value))} was set with --resume, but run old was started "
            assert str(refused.value).startswith(said)
            assert str(refused.value).endswith(f", and {REFUSED[one.name]}; leave it out, or start a new run.")
            continue
        config, _ = read_settings(words)
        assert getattr(getattr(config, one.section), one.name) == value
        assert [change.key for change in config.changed] == ([one.name] if one.name in SHOWN else [])


def test_what_the_run_has_already_is_no_change(old_run: Path) -> None:
    same = [one for one in EVERY if one.default is not None and one.name not in _PLACE]
    words = [word for one in same for word in _words(one, one.default)]
    assert read_settings(["--resume", "old", *words])[0].changed == ()


def test_the_page_lists_what_is_refused_and_what_is_shown() -> None:
    text = PAGE.read_text(encoding="utf-8")
    flags = {one.name: one.flag for one in EVERY}
    for row, names in (("refused", REFUSED), ("accepted and reported", SHOWN)):
        (cells,) = re.findall(rf"^\| {row} \|(.*)$", text, re.MULTILINE)
        listed = set(re.findall(r"`(--[\w-]+)[`.]", cells))
        # Of these only a part is refused, or reported.
        others = {"--task", "--precision"} if row == "refused" else {"--strategy", "--mesh"}
        assert listed - others == {flags[name] for name in names if name != "task"}, row


def test_a_link_is_stored_with_the_run_and_checked(old_run: Path) -> None:
    link = asdict(Link(world_size=4, variables=CANDIDATES[0], small_algo="tree", bucket_s=0.01, default_s=0.0145))
    config = options.make_config({}, find_task("fashion-mnist").Options)
    effect = ResolvedBatch(global_batch_size=64, learning_rate=0.02, warmup_start=0.01, num_workers=2, link=link)
    text = toml.to_toml(config, effect)
    (old_run / "config.toml").write_text(text, encoding="utf-8")
    resumed = read_settings(["--resume", "old"])[0].resumed
    assert resumed is not None
    assert Link.read(resumed.link) == Link.read(link)
    (old_run / "config.toml").write_text(text.replace("NCCL_MAX_NCHANNELS", "LD_PRELOAD"), encoding="utf-8")
    with pytest.raises(SettingError, match="has no valid section"):
        read_settings(["--resume", "old"])


@pytest.mark.parametrize(("key", "usual"), [("tune_link", None), ("bind", True)])
def test_a_run_that_was_not_tuned_or_bound_stays_so(old_run: Path, key: str, usual: bool | None) -> None:
    flag = f"--{key.replace('_', '-')}"
    for before, words, now in (("false", "", False), ("true", "", usual), ("false", flag, True)):
        file = old_run / "config.toml"
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith(key)]
        text = "\n".join(lines).replace("[workers]\n", f"[workers]\n{key} = {before}\n")
        file.write_text(text, encoding="utf-8")
        assert getattr(read_settings(["--resume", "old", *words.split()])[0].workers, key) is now


def test_workers_that_are_no_section_are_refused(old_run: Path) -> None:
    file = old_run / "config.toml"
    head, rest = file.read_text(encoding="utf-8").split("[workers]\n")
    file.write_text(f"workers = 3\n{head}{rest[rest.index('[') :]}", encoding="utf-8")
    with pytest.raises(SettingError, match=r"workers in \S+ was set to 3, but it is a section"):
        read_settings(["--resume", "old"])
