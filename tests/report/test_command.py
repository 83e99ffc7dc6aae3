from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from stormo.errors import MissingPackageError, SettingError, StormoError
from stormo.report import command
from stormo.report.command import write_png
from stormo.report.history import read_history
from stormo.report.page import make_document, make_page, make_panels
from stormo.telemetry.folder import RunFolder
from tests.report.made_run import BEGIN_UNIX_S, MadeRun, append

PANELS = [
    *("loss", "accuracy", "throughput", "rate", "waiting", "stragglers", "noise", "pipeline", "power", "ledger"),
    *("memory", "utilisation", "temperature", "traffic", "timeline", "configuration", "environment", "command"),
]
HOSTILE = "<script>alert(1)<!--"


class Parts(HTMLParser):
    """The elements of a page, and the text of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._in_script = tag == "script"
        if self._in_script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data


def document(*runs: Path) -> dict[str, Any]:
    return make_document([read_history(RunFolder(run)) for run in runs])


def charts(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {chart["id"]: chart for panel in content["panels"] for chart in panel["charts"]}


def test_one_page_with_nothing_to_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = MadeRun(name=HOSTILE, notice=f"{HOSTILE} </script> @css@ \u2028 &amp;")
    folder = made.write(tmp_path)
    assert command.main(["--runs-folder", str(tmp_path)]) == 0  # the newest
    assert str(folder / "report.html") in capsys.readouterr().out
    page = Parts((folder / "report.html").read_text(encoding="utf-8"))
    # The page's own elements only: nothing of the run's texts has become one, and none leads out of the file.
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 3
    assert not {"img", "iframe", "object", "embed", "form"} & set(tags)
    for tag, attributes in page.elements:
        for name in ("src", "href", "action"):
            assert re.match(r"#|data:,$", attributes.get(name) or "#"), (tag, attributes)
    data, *code = page.scripts
    assert json.loads(data)["runs"][0]["name"] == HOSTILE
    assert any(
        made.notice in row for panel in json.loads(data)["panels"] for table in panel["tables"] for row in table["rows"]
    )
    # Only these very scripts may run, and nothing may be fetched.
    [policy] = [a["content"] or "" for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    digests = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in code]
    assert rules["script-src"] == " ".join(f"'sha256-{digest}'" for digest in digests)
    assert (rules["default-src"], rules["connect-src"], rules["img-src"]) == ("'none'", "'none'", "data: blob:")


def test_a_live_page_may_fetch_from_its_server_only(tmp_path: Path) -> None:
    assert "connect-src 'self';" in make_page(document(MadeRun(epochs=1).write(tmp_path)), is_live=True)


def test_every_panel_is_there_and_an_empty_one_says_why(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for content in (document(MadeRun(epochs=1).write(tmp_path)), document(empty)):
        assert [panel["id"] for panel in content["panels"]] == PANELS
        for panel in content["panels"]:
            assert panel["why_empty"] or panel["charts"] or panel["tables"], panel["id"]
            for chart in panel["charts"]:
                assert bool(chart["series"]) != bool(chart["why_empty"]), chart["id"]
    assert all(chart["why_empty"] for chart in charts(content).values())
    assert content["runs"][0]["figures"]["State"] == ("waiting", "nothing written yet")


def test_what_is_not_known_of_the_environment_is_left_out(tmp_path: Path) -> None:
    folder = MadeRun(epochs=1).write(tmp_path)
    known = json.loads((folder / "environment.json").read_text(encoding="utf-8"))

    def shown(more: dict[str, Any]) -> dict[str, str]:
        (folder / "environment.json").write_text(json.dumps({**known, **more}), encoding="utf-8")
        [table] = next(panel["tables"] for panel in document(folder)["panels"] if panel["id"] == "environment")
        return dict(table["rows"])

    reason = {"git_commit_reason": "fatal: not a git repository"}
    assert shown({"git_commit": None, **reason}) == shown({})
    assert shown({"git_commit": "abc", "git_has_changes": False}) == {
        **shown({}),
        "git_commit": "abc",
        "git_has_changes": "False",
    }


def test_the_figures_are_those_of_the_run(tmp_path: Path) -> None:
    content = document(MadeRun(epochs=4, resumed_after_epoch=2).write(tmp_path))
    found = charts(content)
    training, validation = found["loss"]["series"]
    assert (training["name"], len(training["y"]), validation["at"]["epoch"]) == ("training", 80, [1, 2, 3, 4])
    assert validation["at"]["step"] == [20, 40, 60, 80]
    assert training["at"]["epoch"][29] == 1.5
    # The pause of ten minutes is no running time: 26 s and 27 s, the node starts two seconds before rank 0.
    assert training["at"]["time_s"][40] < 30 < validation["at"]["time_s"][-1] < 60
    gpus = next(line for line in found["power"]["series"] if line["name"] == "GPUs")
    assert max(gpus["y"]) == 600.0
    assert found["energy"]["series"][0]["y"][-1] == pytest.approx(sum(part[1][0] for part in stack(content)), rel=1e-5)
    assert [line["name"] for line in found["stragglers"]["series"]] == ["worker 0", "worker 1"]
    assert found["stragglers"]["series"][0]["y"] == [0.0] * 4, "worker 1 waits least: it is the one behind"
    assert min(found["stragglers"]["series"][1]["y"]) > 0
    kinds = [one["kind"] for one in content["timeline"]]
    assert kinds == ["start", "checkpoint", "checkpoint", "resume", "checkpoint", "checkpoint", "warning", "end"]
    assert [(one["step"], one["epoch"]) for one in content["timeline"][2:5]] == [(40, 2.0), (40, 2.0), (60, 3.0)]
    assert [(one["step"], one["epoch"]) for one in content["timeline"][-2:]] == [(80, 4.0), (80, 4.0)]
    figures = content["runs"][0]["figures"]
    assert figures["Accuracy"] == ("91.34 %", "best 91.50 %, loss 0.2500")
    assert figures["Cost"] == ("0.0123 EUR", "12.5 g CO2e")
    assert figures["State"] == ("done", "reached its target; epoch 4, step 80, 1 resume")


def test_a_device_that_two_nodes_of_one_machine_read_is_drawn_once(tmp_path: Path) -> None:
    made = MadeRun(epochs=1)
    folder = made.write(tmp_path)
    append(folder / "nodes" / "1.jsonl", made.node_lines(0))
    found = charts(document(folder))
    assert [max(line["y"]) for line in found["power"]["series"]] == [80.0, 600.0]
    # Another machine's are its own.
    append(tmp_path / "made" / "nodes" / "2.jsonl", [{**line, "host": "other"} for line in made.node_lines(0)])
    assert [max(line["y"]) for line in charts(document(folder))["power"]["series"]] == [160.0, 1200.0]


def test_power_between_two_attempts_is_a_gap(tmp_path: Path) -> None:
    folder = MadeRun(epochs=1).write(tmp_path)
    # The next attempt begins twenty seconds later: too soon for a pause that is left out.
    append(folder / "nodes" / "0.jsonl", MadeRun(epochs=1, begin_unix_s=BEGIN_UNIX_S + 32).node_lines(0))
    for line in charts(document(folder))["power"]["series"]:
        assert len([value for value in line["y"] if value is None]) > 15


def stack(content: dict[str, Any]) -> list[tuple[str, list[float]]]:
    [ledger] = [panel for panel in content["panels"] if panel["id"] == "ledger"]
    parts: list[tuple[str, list[float]]] = ledger["stacks"][0]["parts"]
    return parts


def test_runs_are_compared(tmp_path: Path) -> None:
    runs = [MadeRun(name="a").write(tmp_path), MadeRun(name="b", base_lr=0.04, has_energy=False).write(tmp_path)]
    content = document(*runs)
    assert [(line["run"], line["name"]) for line in charts(content)["rate"]["series"]] == [
        *((0, "learning rate"), (1, "learning rate"))
    ]
    [table] = [table for panel in content["panels"] for table in panel["tables"] if table["id"] == "configuration"]
    assert [table["rows"][row] for row in table["marked"]] == [["optimizer.base_lr", "0.01", "0.04"]]
    [ledger] = [panel for panel in content["panels"] if panel["id"] == "ledger"]
    assert ledger["stacks"][0]["bars"] == ["a"]
    assert any(note.startswith("b: ") and "DRAM counter" in note for note in ledger["notes"])


def test_a_run_too_short_for_records_of_steps_is_drawn_by_its_epochs(tmp_path: Path) -> None:
    folder = MadeRun(name="short", epochs=3).write(tmp_path)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step_done"]
    (folder / "events.jsonl").unlink()
    append(folder / "events.jsonl", [event for event in events if event not in steps[1:]])
    found = charts(document(MadeRun(name="usual", epochs=1).write(tmp_path), folder))
    lines = {chart: [line for line in found[chart]["series"] if line["run"] == 1] for chart in ("loss", "throughput")}
    epochs = [event for event in events if event["event"] == "epoch_done"]
    training, validation = lines["loss"]
    assert training["y"] == [pytest.approx(event["train_loss"], rel=1e-5) for event in epochs]
    assert (training["at"], training["mode"]) == (validation["at"], "points")
    assert [line["y"] for line in lines["throughput"]] == [[1000.0] * 3]
    usual = [line for line in found["loss"]["series"] if line["run"] == 0]
    assert (len(usual[0]["y"]), usual[0]["mode"]) == (20, "lines")


def test_a_long_run_is_thinned_and_says_so(tmp_path: Path) -> None:
    content = document(MadeRun(epochs=70).write(tmp_path))
    loss = charts(content)["loss"]
    assert len(loss["series"][0]["y"]) < 1400
    assert "1,470 points drawn as" in loss["note"]


def test_csv_files_hold_every_point_and_no_formula(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [MadeRun(name="=1+1", epochs=70), MadeRun(name="b", num_workers=16, num_gpus=16, epochs=1)]
    for run in runs:
        run.write(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    assert command.main(["=1+1", "b", "--csv", "figures"]) == 0
    assert (tmp_path / "runs" / "report.html").is_file()
    with (tmp_path / "figures" / "loss.csv").open(newline="", encoding="utf-8") as file:
        head, *rows = list(csv.reader(file))
    assert head == ["run", "series", "step", "epoch", "time_s", "loss"]
    assert len(rows) == (70 + 1) * (20 + 1)
    assert {row[0] for row in rows} == {"'=1+1", "b"}
    with (tmp_path / "figures" / "power-gpu.csv").open(newline="", encoding="utf-8") as file:
        assert {f"GPU {gpu}" for gpu in range(16)} <= {row[1] for row in csv.reader(file)}
    assert (tmp_path / "figures" / "table-ledger.csv").is_file()


def test_png_files(tmp_path: Path) -> None:
    history = read_history(RunFolder(MadeRun(name="a $b$ c", epochs=2).write(tmp_path)))
    panels = [panel for panel in make_panels([history]) if panel.id in ("loss", "ledger")]
    written = write_png(tmp_path / "png", panels, [history.label])
    assert [path.name for path in written] == ["loss.png", "stack-ledger.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_errors_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = MadeRun(name="made", epochs=1).write(tmp_path)
    runs_folder = ["--runs-folder", str(tmp_path)]
    with pytest.raises(SettingError, match="did you mean made"):
        command.main(["mad", *runs_folder])
    with pytest.raises(SettingError, match="there is no run"):
        command.main(["--runs-folder", str(tmp_path / "none")])
    with pytest.raises(SettingError, match=r"--output .* cannot be written \(No such file"):
        command.main(["made", *runs_folder, "--output", str(tmp_path / "no" / "page.html")])
    with pytest.raises(SettingError, match="--output /dev/null was set, but it is not an ordinary file"):
        command.main(["made", *runs_folder, "--output", "/dev/null"])
    (folder / "report.html").mkdir()
    with pytest.raises(SettingError, match=r"^the page would be .*report\.html, but .* another file with --output"):
        command.main(["made", *runs_folder])
    (folder / "report.html").rmdir()
    for option in ("--output", "--csv", "--png"):
        with pytest.raises(SettingError, match=f"{option} was set to an empty name"):
            command.main(["made", *runs_folder, option, ""])
    with pytest.raises(SettingError, match=r"--csv .* cannot be written"):
        command.main(["made", *runs_folder, "--csv", str(folder / "config.toml")])
    events = folder / "events.jsonl"
    events.write_text('{"event": "notice", "time_unix_s": 1}\n{"event": "notice"}\n')
    with pytest.raises(StormoError, match="line 2 has no time"):
        command.main(["made", *runs_folder])
    find_spec = importlib.util.find_spec
    for missing, option, extra in (("plotly", "--csv", "report"), ("matplotlib", "--png", "plot")):
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, missing=missing: None if name == missing else find_spec(name)
        )
        with pytest.raises(MissingPackageError, match=rf"stormo\[{extra}\]"):
            command.main(["made", *runs_folder, option, "x"])


def test_two_runs_of_one_name_get_different_labels(tmp_path: Path) -> None:
    one, other = RunFolder(tmp_path / "a" / "run"), RunFolder(tmp_path / "b" / "run")
    assert command.run_labels([one, other]) == [str(one.path), str(other.path)]
    assert command.run_labels([one]) == ["run"]
