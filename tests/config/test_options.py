"""Flags, TOML files and the help, which all come from the same dataclasses."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stormo.config import options, toml
from stormo.config.layout import resolve_layout
from stormo.config.options import UsageError
from stormo.config.plan import check_settings, resolve
from stormo.config.schema import CALL_ONLY, EFFECTIVE, SECTIONS, ResolvedBatch, TrainConfig, option
from stormo.errors import SettingError, StormoError
from stormo.tasks.find import find_task
from stormo.training.settings import read_settings


@dataclass(frozen=True, kw_only=True)
class OwnOptions:
    """Options of a task of these tests."""

    width: int = option(10, "how wide; 100% is 10")
    rate: float | None = option(None, "a rate")
    flip: bool = option(False, "mirror images")
    data_folder: str | None = option(None, "where the data is")
    shape: Literal["round", "square"] = option("round", "the shape")


EVERY = options.train_options(OwnOptions)
EFFECT = ResolvedBatch(global_batch_size=64, learning_rate=0.02, warmup_start=0.01)


def parse(*arguments: str) -> dict[str, Any]:
    return options.parse_flags("stormo train", arguments, EVERY, "Task own")


def from_toml(text: str) -> dict[str, Any]:
    return toml.settings_from_toml(tomllib.loads(text), EVERY, "my.toml")


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


# --- flags ------------------------------------------------------------------------------------------------------------


def test_only_what_was_typed_is_given() -> None:
    assert parse() == {}
    assert parse("--epochs", "3") == {"epochs": 3}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--batch-size", "8"], {"batch_size": 8}),
        (["--batch_size", "8"], {"batch_size": 8}),
        (["--batch-size", "auto"], {"batch_size": "auto"}),
        (["--batch_size=8"], {"batch_size": 8}),
        (["--run_name=a_b"], {"run_name": "a_b"}),  # underscores of a value stay
        (["--run-name", "a_b"], {"run_name": "a_b"}),
        (["--base-lr", "1e-3"], {"base_lr": 1e-3}),
        (["--nesterov"], {"nesterov": True}),
        (["--no-nesterov"], {"nesterov": False}),
        (["--no_sync_batch_norm"], {"sync_batch_norm": False}),
        (["--compile"], {"compile": True}),
        (["--no-compile"], {"compile": False}),
        (["--decay", "cosine"], {"decay": "cosine"}),
        (["--num-gpus", "4"], {"num_gpus": 4}),
        (["--resume"], {"resume": ""}),
        (["--resume", "a"], {"resume": "a"}),
        (["my_task.py", "--epochs", "2"], {"task": "my_task.py", "epochs": 2}),
        (["--epochs", "2", "my_task.py"], {"task": "my_task.py", "epochs": 2}),
        (["--task.width", "3"], {"task.width": 3}),
        (["--task.data_folder", "/data_1"], {"task.data_folder": "/data_1"}),
        (["--task.flip"], {"task.flip": True}),
        (["--no-task.flip"], {"task.flip": False}),
        (["--task.shape=square"], {"task.shape": "square"}),
        (["--epochs", "2", "--epochs", "5"], {"epochs": 5}),  # the last one wins
    ],
)
def test_a_flag_in_every_spelling(arguments: list[str], expected: dict[str, Any]) -> None:
    assert parse(*arguments) == expected


@pytest.mark.parametrize(
    ("flag", "closest"),
    [
        ("--batch-sise", "did you mean --batch-size? "),
        ("--epoch", "did you mean --epochs? "),
        ("--task.widht", "did you mean --task.width? "),
        ("--width", "did you mean --task.width? "),
        ("--batch", "did you mean --batch-size? "),
        ("-n", "did you mean --num-gpus? "),
        ("--workers", "did you mean --num-gpus? "),
        ("--lr", "did you mean --base-lr? "),
        ("--quux", ""),
    ],
)
def test_an_unknown_option_names_the_closest_one(flag: str, closest: str) -> None:
    for arguments in (["my_task.py", flag, "3"], ["my_task.py", f"{flag}=3"]):
        with pytest.raises(SettingError) as caught:
            parse(*arguments)
        assert str(caught.value) == (
            f"option '{flag}' was asked for, but there is none of that name; "
            f"{closest}stormo train --help all lists them."
        )


def test_a_missing_value_and_a_value_of_a_switch_are_usage_errors() -> None:
    with pytest.raises(UsageError, match=r"^argument --epochs: expected one argument; see stormo train --help\.$"):
        parse("--epochs")
    with pytest.raises(UsageError, match="--nesterov"):
        parse("--nesterov=yes")
    assert UsageError.exit_code == SettingError.exit_code == 2


def test_an_unknown_option_is_named_although_no_task_was_given() -> None:
    with pytest.raises(SettingError, match="option '--batch-sise'"):
        read_settings(["--batch-sise", "32"])
    with pytest.raises(SettingError, match=r"option '--width' .* did you mean --task\.width\?"):
        read_settings(["--width", "32"])
    with pytest.raises(SettingError, match=r"--device 'gpu' .* did you mean cuda\?"):
        read_settings(["--device", "gpu"])


@settings(max_examples=40)
@given(
    st.integers(min_value=-(2**63) + 1, max_value=2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
)
def test_numbers_survive_the_command_line(whole: int, number: float, switch: bool) -> None:
    parsed = parse(f"--num-gpus={whole}", f"--base-lr={number!r}", "--compile" if switch else "--no-compile")
    assert parsed == {"num_gpus": whole, "base_lr": number, "compile": switch}


@settings(max_examples=60)
@given(st.sampled_from(EVERY), st.text(max_size=30))
def test_any_text_is_taken_in_its_type_or_refused_in_one_sentence(one: options.Option, text: str) -> None:
    try:
        value = one.convert(text, one.flag)
    except SettingError as error:
        sentence = str(error)
    else:
        assert type(value) is one.kind or value in one.keywords
        assert not one.choices or value in one.choices
        return
    assert ", but " in sentence
    assert "; " in sentence
    assert sentence.endswith(".")


@pytest.mark.parametrize("key", ["seed", "epochs"])
def test_a_whole_number_beyond_floats_is_taken_or_refused_in_one_sentence(key: str) -> None:
    try:
        parse(f"--{key}", "1" * 400)
    except SettingError:
        return


# --- the task among the flags -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "task"),
    [
        (["--task.flip", "my_task.py"], "my_task.py"),
        (["--no-task.flip", "my_task.py:Mine"], "my_task.py:Mine"),
        (["--task.flip", "package.module:Mine"], "package.module:Mine"),
        (["--task.flip", "fashion-mnist"], "fashion-mnist"),
        (["--task.width", "2", "my_task.py"], "my_task.py"),
        (["--task.width=2", "my_task.py"], "my_task.py"),
        (["--task.data_folder", "/data", "--epochs", "2", "my_task.py"], "my_task.py"),
        (["my_task.py", "--task.width", "2"], "my_task.py"),
        (["--task.width", "2"], None),
        (["--help"], None),
    ],
)
def test_the_task_is_found_before_its_options_are_known(arguments: list[str], task: str | None) -> None:
    from stormo.training.settings import _looks_like_task

    peeked = options.peek_flags(arguments, options.train_options(), _looks_like_task)
    assert peeked.get("task") == task
    assert not any(key.startswith("task.") for key in peeked)


def test_options_of_the_task_are_typed_and_reach_it(tmp_path: Path) -> None:
    path = tmp_path / "my_own_task.py"
    write(
        path,
        "from dataclasses import dataclass\nfrom stormo.config import option\nfrom stormo.tasks.task import Task\n\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Options:\n    flip: bool = option(False, 'mirror')\n"
        "    width: int = option(10, 'width')\n\nclass Mine(Task):\n    Options = Options\n",
    )
    config, task_class = read_settings(["--task.flip", str(path), "--task.width", "3"])
    assert (config.task, task_class.__name__) == (str(path), "Mine")
    assert dataclasses.asdict(config.task_options) == {"flip": True, "width": 3}
    assert config.given == {"task", "task.flip", "task.width"}


# --- help -------------------------------------------------------------------------------------------------------------


def test_help_shows_every_flag_with_its_default_in_its_section() -> None:
    text = options.build_parser("stormo train", options.all_common(EVERY), "Task own").format_help()
    flat = " ".join(text.split())
    for one in EVERY:
        assert one.flag in text
        assert one.help in flat
        if one.default is not None and one.kind is not bool:
            assert f"(default: {one.default})" in flat
    for cls in SECTIONS.values():
        assert (cls.__doc__ or "").rstrip(".") in text
    assert "Task own:" in text
    assert "--task.flip, --no-task.flip" in text
    assert "{round,square}" in text
    assert "how wide; 100% is 10 (default: 10)" in flat
    assert all(len(line) <= 110 for line in text.splitlines())


def test_the_short_help_shows_the_common_options_and_how_to_see_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for arguments in (["--help"], ["--help", "all"], ["my_task.py", "-h", "all"]):
        with pytest.raises(SystemExit):
            parse(*arguments)
        shown.append(capsys.readouterr().out)
    short, *whole = shown
    common = [one for one in EVERY if one.common]
    assert {*re.findall(r"(?m)^  (--[a-z.-]+)", short)} == {one.flag for one in common}
    assert 15 <= sum(one.section != "task" for one in common) <= 25
    assert short.endswith(f"stormo train --help all shows the other {len(EVERY) - len(common)} options.\n")
    for text in whole:
        assert {*re.findall(r"(?m)^  (--[a-z0-9.-]+)", text)} == {one.flag for one in EVERY}


def test_all_behind_help_is_no_task() -> None:
    assert "task" not in options.peek_flags(["--help", "all"], EVERY, lambda word: True)
    assert options.peek_flags(["all"], EVERY, lambda word: True) == {"task": "all"}


def test_every_field_of_the_settings_has_its_line_of_help() -> None:
    assert [one.name for one in EVERY if not one.help] == []
    assert len({one.key for one in EVERY}) == len(EVERY)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "--help"], ["train", "fashion-mnist", "-h"], ["--version"]]
)
def test_help_never_imports_torch_or_numpy(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom stormo.cli import main\n"
        f"try:\n    code = main({arguments!r})\nexcept SystemExit as stop:\n    code = stop.code\n"
        "heavy = {'torch', 'numpy', 'rich', 'tensorboard'} & set(sys.modules)\n"
        "sys.exit(f'{code} {heavy}' if code or heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    if "train" in arguments:
        assert "--task.width X" in done.stdout


# --- TOML -------------------------------------------------------------------------------------------------------------


def test_sections_keys_and_spellings_of_a_toml_file() -> None:
    settings_given = from_toml(
        'task = "x.py"\n[batch]\nbatch-size = 8\naccumulate = 2\n[optimizer]\nbase_lr = 1\nnesterov = true\n'
        '[task_options]\nwidth = 3\nshape = "square"\n[effective]\nglobal_batch_size = 3\n'
    )
    assert settings_given == {
        "task": "x.py",
        "batch_size": 8,
        "accumulate": 2,
        "base_lr": 1.0,
        "nesterov": True,
        "task.width": 3,
        "task.shape": "square",
    }
    assert type(settings_given["base_lr"]) is float


@pytest.mark.parametrize("text", ["[task]\nwidth = 2", "task = 3"])
def test_a_task_that_is_no_text_is_refused(text: str) -> None:
    with pytest.raises(SettingError):
        from_toml(text)


def test_a_file_that_cannot_be_read_or_parsed_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"absent.toml was set, but it cannot be read \(No such file"):
        toml.read_toml(tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_bytes(b"[batch\n")
    with pytest.raises(SettingError, match=r"it is not valid TOML \(.*line 1"):
        toml.read_toml(tmp_path / "bad.toml")
    (tmp_path / "latin.toml").write_bytes(b'task = "\xe9"\n')
    with pytest.raises(SettingError, match=r"^latin is resumed, but it is not valid TOML.*; save it as UTF-8"):
        toml.read_toml(tmp_path / "latin.toml", "latin is resumed")
    (tmp_path / "task.toml").write_text('task = "fashion-mnist"\n[task]  # guessed\nwidth = 2\n')
    with pytest.raises(SettingError, match=r"; the section of a task's own options is \[task_options\]"):
        toml.read_toml(tmp_path / "task.toml")


# --- precedence -------------------------------------------------------------------------------------------------------


def _stored_run(folder: Path, name: str, **flags: Any) -> None:
    """A run folder as a run leaves it, without its checkpoints."""
    config = options.make_config({"run_name": name, **flags}, find_task("fashion-mnist").Options)
    (folder / name).mkdir(parents=True)
    (folder / name / "config.toml").write_text(toml.to_toml(config, EFFECT), encoding="utf-8")


def test_flags_win_over_the_file_the_file_over_the_run_the_run_over_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stormo.training.resume.visible_gpus", list)
    _stored_run(tmp_path / "runs", "old", patience=5, epochs=6, keep_checkpoints=7, num_gpus=2, timeout=9.0)
    file = write(tmp_path / "my.toml", "[stop]\nepochs = 8\n[run]\nkeep_checkpoints = 9\n")
    config, _ = read_settings(["--resume", "old", "--config", file, "--keep-checkpoints", "10"])
    assert config.stop.target_loss is None  # default
    assert config.stop.patience == 5  # of the run
    assert config.stop.epochs == 8  # of the file
    assert config.run.keep_checkpoints == 10  # of the flag
    assert (config.workers.num_gpus, config.workers.timeout) == (2, 600.0)  # only the number of CPU processes
    assert config.run.run_name == "old"
    assert config.resumed == EFFECT
    assert {"epochs", "keep_checkpoints"} <= config.given
    monkeypatch.setattr("stormo.training.resume.visible_slices", lambda: [object()])
    monkeypatch.setattr("stormo.training.resume.visible_gpus", lambda: pytest.fail("CUDA was started too early"))
    assert read_settings(["--resume", "old"])[0].workers.num_gpus is None  # all GPUs that are there now
    assert "patience" not in config.given
    assert read_settings(["--config", file])[0].resumed is None
    write(tmp_path / "runs" / "old" / "config.toml", "")
    with pytest.raises(SettingError, match=r"run old was to be resumed, but .*config\.toml has no valid section \["):
        read_settings(["fashion-mnist", "--run-name", "old", "--resume"])


def test_a_resume_finds_the_run_by_flag_by_name_by_path_and_by_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(("first", "second")):
        _stored_run(tmp_path / "runs", name, patience=5 + age)
        event = json.dumps({"event": "run_started", "time_unix_s": 1000.0 + age})
        (tmp_path / "runs" / name / "events.jsonl").write_text(event + "\n", encoding="utf-8")
    named = {
        "second": ["--resume"],
        "first": ["--resume", "first"],
    }
    for name, arguments in named.items():
        assert read_settings(arguments)[0].run.run_name == name
    assert read_settings(["--resume", "--run-name", "first"])[0].run.run_name == "first"
    assert read_settings(["--resume", str(tmp_path / "runs" / "first")])[0].run.run_name == "first"
    checkpoint = tmp_path / "runs" / "first" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    write(checkpoint / "manifest.json", "{}")
    config, _ = read_settings(["--resume", str(checkpoint)])
    assert (config.run.run_name, config.run.runs_folder) == ("first", str(tmp_path / "runs"))
    with pytest.raises(SettingError, match="did you mean first"):
        read_settings(["--resume", "frist"])
    with pytest.raises(SettingError, match=r"--resume was set, but there is no run in empty; "):
        read_settings(["--resume", "--runs-folder", "empty"])


def test_a_task_option_that_was_left_out_cannot_appear_on_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _stored_run(tmp_path / "runs", "old")
    with pytest.raises(SettingError):
        read_settings(["--resume", "old", "--task.train-samples", "100"])


def test_the_run_to_go_on_with_is_looked_for_where_the_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _stored_run(tmp_path / "elsewhere", "old", patience=5)
    file = write(tmp_path / "my.toml", '[run]\nruns_folder = "elsewhere"\nrun_name = "old"\n')
    config, _ = read_settings(["--config", file, "--resume"])
    assert config.stop.patience == 5


def test_resume_in_a_file_means_what_the_flag_means_or_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _stored_run(tmp_path / "runs", "old", patience=5)
    file = write(tmp_path / "my.toml", '[run]\nresume = "old"\n')
    try:
        config, _ = read_settings(["--config", file])
    except SettingError:
        return
    assert (config.run.run_name, config.stop.patience) == ("old", 5)


def test_an_unknown_task_is_refused_with_the_choices() -> None:
    with pytest.raises(SettingError, match="did you mean fashion-mnist"):
        read_settings(["fashion-mnst"])


# --- round trip -------------------------------------------------------------------------------------------------------


def _values(one: options.Option) -> st.SearchStrategy[Any]:
    if one.choices:
        return st.sampled_from(one.choices)
    text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x7f"))  # see the test below
    numbers = st.floats(allow_nan=False, allow_infinity=False)
    whole = st.integers(min_value=-(2**63) + 1, max_value=2**63 - 1)
    values = {int: whole, float: numbers, bool: st.booleans(), str: text}[one.kind]
    return st.one_of(values, st.sampled_from(one.keywords)) if one.keywords else values


_NOT_STORED = ("resume", "run_name", "global_batch_size", *CALL_ONLY)
_STORED = [one for one in EVERY if one.section != "command" and one.name not in _NOT_STORED]


@settings(max_examples=40)
@given(st.fixed_dictionaries({}, optional={one.key: _values(one) for one in _STORED}))
def test_settings_survive_the_file_of_a_run(given_settings: dict[str, Any]) -> None:
    config = options.make_config(given_settings, OwnOptions)
    document = tomllib.loads(toml.to_toml(config, EFFECT))
    assert ResolvedBatch(**document[EFFECTIVE]) == EFFECT
    again = options.make_config(toml.settings_from_toml(document, EVERY, "x"), OwnOptions)
    assert dataclasses.replace(again, given=frozenset()) == dataclasses.replace(config, given=frozenset())


# What may stand in a file, and what of it is left under flags that name something else.
_REPLACED = [
    ('[workers]\ncompress = "powersgd"\ncompress_rank = 8', "--compress bf16", {"compress"}),
    ('[workers]\ncompress = "powersgd"\ncompress_rank = 8', "--compress powersgd", {"compress", "compress_rank"}),
    ('[workers]\nstrategy = "server"\nservers = 2\nstaleness = 1', "--strategy ddp", {"strategy"}),
    ('[workers]\nstrategy = "server"\nservers = 2\nstaleness = 1', "--mesh shard=4", {"mesh"}),
    ('[workers]\nmesh = "shard=4"\nzero = 1\n[sharding]\noffload = true', "--strategy ddp", {"strategy"}),
    ('[workers]\nmesh = "shard=4"\nzero = 1\n[sharding]\noffload = true', "--strategy auto", {"strategy"}),
    ('[workers]\nmesh = "shard=4"\nzero = 1', "--mesh replicate=2,shard=2", {"mesh", "zero"}),
    (
        '[workers]\nstrategy = "local"\n[optimizer]\naverage_every = "8"\nouter_lr = 0.7\nouter_momentum = 0.9',
        "--strategy auto",
        {"strategy"},
    ),
    (
        '[workers]\nstrategy = "pipeline"\n[sharding]\nschedule = "gpipe"\nmicro_batches = 4',
        "--strategy naive",
        {"strategy"},
    ),
    ('[workers]\nstrategy = "pipeline"\n[sharding]\nmicro_batches = 4', "--mesh pipeline=4", {"mesh", "micro_batches"}),
    ('[workers]\nstrategy = "fsdp"\n[sharding]\nshard_modules = "Block"', "--strategy ddp", {"strategy"}),
    (
        '[workers]\nstrategy = "fsdp"\n[sharding]\nshard_modules = "Block"',
        "--strategy ddp --checkpoint-activations",
        {"strategy", "checkpoint_activations", "shard_modules"},
    ),
    ('[optimizer]\noptimizer = "adamw"\nbeta2 = 0.9\neps = 1e-3', "--optimizer lars", {"optimizer"}),
    ('[optimizer]\noptimizer = "adamw"\nbeta2 = 0.9', "--optimizer lamb", {"optimizer", "beta2"}),
    ("[optimizer]\nnesterov = true", "--optimizer adamw", {"optimizer"}),
    ('[stop]\non_divergence = "rollback"\nmax_rollbacks = 2', "--on-divergence stop", {"on_divergence"}),
    ("[batch]\nghost_batch_size = 16", "--sync-batch-norm", {"sync_batch_norm"}),
    ("[batch]\nbatch_size = 512", "--global-batch-size 64", {"global_batch_size"}),
    ("[batch]\nglobal_batch_size = 512", "--batch-size 8", {"batch_size"}),
    ("[batch]\nglobal_batch_size = 512", "--batch-size auto", {"batch_size", "global_batch_size"}),
    ('[batch]\ngrow_batch = "1:2x"\nmax_batch_size = 64', "--batch-size auto", {"grow_batch", "batch_size"}),
    ('[batch]\nbatch_size = "auto"\nglobal_batch_size = 512', "--batch-size 8", {"batch_size"}),
    ("[optimizer]\nbase_batch_size = 64", "--lr-rule none", {"lr_rule"}),
    ('[workers]\nhosts = "a,b"', "--hostfile hosts", {"hostfile"}),
]


@pytest.mark.parametrize(("text", "flags", "left"), _REPLACED)
def test_a_choice_that_a_flag_names_replaces_that_of_the_file_with_what_belongs_to_it(
    tmp_path: Path, text: str, flags: str, left: set[str]
) -> None:
    file, always = write(tmp_path / "my.toml", text), ["--device", "cpu", "--num-gpus", "4"]
    config, task_class = read_settings(["--config", file, *always, *flags.split()])
    assert config.given == left | {"config", "device", "num_gpus"}
    resolve(config, resolve_layout(config, ()), task_class(config.task_options).facts())


@pytest.mark.parametrize(("text", "flags"), [(text, flags) for text, flags, _ in _REPLACED if "[workers]" not in text])
def test_a_choice_that_the_user_names_replaces_that_of_a_task(
    monkeypatch: pytest.MonkeyPatch, text: str, flags: str
) -> None:
    task_class = find_task("fashion-mnist")
    defaults = {key: value for section in tomllib.loads(text).values() for key, value in section.items()}
    monkeypatch.setattr(
        "stormo.training.settings.find_task", lambda name: type("Mine", (task_class,), {"defaults": defaults})
    )
    config, mine = read_settings(["--device", "cpu", "--num-gpus", "4", *flags.split()])
    resolve(config, resolve_layout(config, ()), mine(config.task_options).facts())


def test_what_a_file_says_against_itself_and_what_flags_say_against_each_other_is_refused(tmp_path: Path) -> None:
    for text, flags in (("[workers]\ncompress_rank = 8", ""), ("", "--compress bf16 --compress-rank 8")):
        config, _ = read_settings(["--config", write(tmp_path / "my.toml", text), "--device", "cpu", *flags.split()])
        with pytest.raises(SettingError, match="--compress-rank 8 was set, but it needs"):
            check_settings(config, resolve_layout(config, ()))


@pytest.mark.parametrize(
    ("begun", "now"),
    [
        ({"compress": "powersgd", "compress_rank": 8}, "--compress none"),
        ({"ghost_batch_size": 16}, "--sync-batch-norm"),
        ({"strategy": "fsdp", "shard_modules": "Block", "offload": True}, "--strategy ddp"),
        ({"strategy": "pipeline", "micro_batches": 4}, "--strategy naive"),
        ({"grow_batch": "1:2x", "max_batch_size": 64}, "--batch-size auto"),
        ({"base_batch_size": 64}, "--lr-rule none"),
    ],
)
def test_a_choice_that_a_resume_names_replaces_that_of_the_run_with_what_belongs_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: dict[str, Any], now: str
) -> None:
    monkeypatch.chdir(tmp_path)
    _stored_run(tmp_path / "runs", "old", **begun)
    config, task_class = read_settings(["--resume", "old", "--device", "cpu", "--num-gpus", "4", *now.split()])
    resolve(config, resolve_layout(config, ()), task_class(config.task_options).facts())


@pytest.mark.parametrize(
    ("begun", "between", "again"),
    [
        ({"strategy": "pipeline", "micro_batches": 8, "schedule": "gpipe"}, "--strategy ddp", "--strategy pipeline"),
        ({"strategy": "local", "average_every": "4", "outer_momentum": 0.9}, "--strategy ddp", "--strategy local"),
        ({"compress": "powersgd", "compress_rank": 8}, "--compress none", "--compress powersgd"),
        ({"on_divergence": "rollback", "rollback_factor": 0.3}, "--on-divergence stop", "--on-divergence rollback"),
        ({"strategy": "fsdp", "offload": True}, "--checkpoint-every 9", "--strategy fsdp"),
    ],
)
def test_what_has_no_effect_for_a_while_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: dict[str, Any], between: str, again: str
) -> None:
    monkeypatch.chdir(tmp_path)
    _stored_run(tmp_path / "runs", "old", **begun)
    for words in (between, again):
        config, _ = read_settings(["--resume", "old", "--device", "cpu", "--num-gpus", "4", *words.split()])
        resolve_layout(config, ())
        write(tmp_path / "runs" / "old" / "config.toml", toml.to_toml(config, EFFECT))
    found = options.flat_settings(config)
    assert {key: found.get(key) for key in begun} == begun


def test_what_a_resume_must_leave_out_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _stored_run(tmp_path / "runs", "old", ghost_batch_size=16)
    config, _ = read_settings(["--resume", "old", "--device", "cpu", "--sync-batch-norm"])
    assert sorted(map(str, config.changed)) == [
        "--ghost-batch-size left out (16 before)",
        "--sync-batch-norm (off before)",
    ]


def test_compression_is_kept_with_replicas_and_its_end_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _stored_run(tmp_path / "runs", "small", compress="bf16")
    _stored_run(tmp_path / "runs", "served", strategy="server", staleness=2)

    def resumed(name: str, *flags: str) -> tuple[str, int, list[str]]:
        config, _ = read_settings(["--resume", name, "--device", "cpu", "--num-gpus", "2", *flags])
        return config.workers.compress, config.workers.staleness, [str(change) for change in config.changed]

    assert resumed("small", "--mesh", "replicate=2") == ("bf16", 0, [])
    assert resumed("small", "--strategy", "fsdp")[2][-1] == "--compress none (bf16 before)"
    assert resumed("small", "--mesh", "shard=2")[2][-1] == "--compress none (bf16 before)"
    assert resumed("served") == ("none", 2, [])
    assert resumed("served", "--strategy", "ddp")[2][-1] == "--staleness 0 (2 before)"


def test_a_file_whose_mesh_a_flag_replaces_takes_nothing_from_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path / "my.toml", '[workers]\nmesh = "shard=4"\n')
    _stored_run(tmp_path / "runs", "small", strategy="ddp", compress="bf16")
    config, _ = read_settings(["--resume", "small", "--config", file, "--strategy", "ddp"])
    assert (config.workers.mesh, config.workers.compress) == (None, "bf16")
    _stored_run(tmp_path / "runs", "served", strategy="server", servers=2, staleness=1)
    config, _ = read_settings(["--resume", "served", "--config", file, "--strategy", "server"])
    assert (config.workers.servers, config.workers.staleness) == (2, 1)


@pytest.mark.parametrize(
    "flags",
    [
        *("", "--strategy server --servers 2", "--mesh pipeline=2,shard=2 --zero 1", "--strategy local"),
        *("--compress powersgd --compress-rank 2", "--optimizer novograd --grad-averaging", "--gradient-noise 0.1"),
    ],
)
def test_the_file_of_a_run_repeats_it(tmp_path: Path, flags: str) -> None:
    config, task_class = read_settings(["--device", "cpu", "--num-gpus", "4", *flags.split()])
    facts = task_class(config.task_options).facts()
    plan = resolve(config, resolve_layout(config, ()), facts)
    again, _ = read_settings(["--config", write(tmp_path / "config.toml", toml.to_toml(config, plan.initial))])
    assert resolve(again, resolve_layout(again, ()), facts) == plan


def test_the_character_del_survives_the_file_of_a_run() -> None:
    tomllib.loads(toml.to_toml(options.make_config({"runs_folder": "a\x7fb"}, None), EFFECT))


def test_the_file_of_a_run_leaves_out_what_belongs_to_one_call() -> None:
    given_settings = {"resume": "x", "dry_run": True, "global_batch_size": 64, "config": "my.toml"}
    document = tomllib.loads(toml.to_toml(options.make_config(given_settings, None), EFFECT))
    assert "resume" not in document["run"]
    assert "command" not in document
    batch = {"global_batch_size": 64, "accumulate": 1, "on_resize": "keep"}  # only one of the two batch sizes is set
    assert document["batch"] == batch


def test_a_resume_keeps_auto_until_a_number_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _stored_run(tmp_path / "runs", "old", batch_size="auto", global_batch_size=64)
    config, _ = read_settings(["--resume", "old"])
    assert (config.batch.batch_size, config.batch.global_batch_size, config.resumed) == ("auto", 64, EFFECT)
    config, _ = read_settings(["--resume", "old", "--batch-size", "8"])
    assert (config.batch.batch_size, [change.key for change in config.changed]) == (8, ["batch_size"])


def test_auto_is_a_word_in_a_file_and_help_names_it() -> None:
    assert from_toml('[batch]\nbatch_size = "auto"') == {"batch_size": "auto"}
    with pytest.raises(SettingError, match=r"batch_size in my.toml was set to 'all', but it takes a whole number or"):
        from_toml('[batch]\nbatch_size = "all"')
    assert "--batch-size N|auto" in options.build_parser("stormo train", EVERY, "Task own").format_help()


def test_auto_rests_on_the_number_that_would_hold_without_it() -> None:
    assert options.make_config({"batch_size": "auto"}, None).auto_batch_size == 32
    own = {"batch_size": 8, "global_batch_size": 512}
    config = options.make_config({"batch_size": "auto"}, None, own)
    assert (config.auto_batch_size, config.batch.batch_size, config.batch.global_batch_size) == (8, "auto", 512)
    assert options.make_config({"batch_size": 4}, None, own).batch.global_batch_size is None


def test_what_must_agree_on_all_nodes_leaves_out_what_may_differ() -> None:
    config = options.make_config({"node_id": 0, "task.data_folder": "/here"}, OwnOptions)
    flat = options.flat_settings(config)
    assert flat["task"] == TrainConfig.task
    assert flat["task.width"] == 10
    assert "node_id" not in flat
    assert "task.data_folder" not in flat


# --- declarations -----------------------------------------------------------------------------------------------------


def test_an_option_of_a_type_that_no_flag_can_give_is_refused() -> None:
    @dataclass(frozen=True)
    class Lists:
        sizes: list[int] = option(None, "sizes")

    with pytest.raises(SettingError, match="option sizes of section task is declared as list"):
        options.options_of("task", Lists)


def test_a_flag_that_joins_may_be_repeated() -> None:
    @dataclass(frozen=True)
    class Lists:
        a_list: str | None = option(None, "names", joins=",")
        from_: str | None = option(None, "where from")

    words = ["--a-list", "1", "--from", "x", "--a_list=2", "rest", "--more"]
    assert options.take_flags("p", "u", "d", words, ("own", Lists)) == (
        {"a_list": "1,2", "from_": "x"},
        ["rest", "--more"],
    )


def test_every_error_of_this_module_is_shown_without_a_traceback() -> None:
    assert issubclass(UsageError, StormoError)
    assert issubclass(SettingError, StormoError)


def test_a_negative_number_is_a_value_also_of_a_tasks_option() -> None:
    config, _ = read_settings(["--task.width", "-1"])
    assert config.task_options.width == -1


def test_an_option_of_a_task_may_end_in_an_underscore(tmp_path: Path) -> None:
    file = tmp_path / "underscore.py"
    file.write_text(
        "from dataclasses import dataclass\nfrom stormo.config import option\n"
        "from tests.system.task import Options, Tiny\n"
        '@dataclass(frozen=True, kw_only=True)\nclass More(Options):\n    lambda_: float = option(1.0, "a weight")\n'
        "class Mine(Tiny):\n    Options = More\n"
    )
    config, _ = read_settings([str(file), "--task.lambda_", "2"])
    assert config.task_options.lambda_ == 2.0
    again, _ = read_settings([str(file), *options.as_flags({"task.lambda_": 3.0})])
    assert again.task_options.lambda_ == 3.0
