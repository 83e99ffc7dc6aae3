"""`stormo report RUN…`: one HTML page of one or several runs, and their figures as CSV and PNG files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from stormo.config.options import Parser
from stormo.errors import SettingError, counted
from stormo.report.exports import check_matplotlib, write_csv, write_png
from stormo.report.history import Reader
from stormo.report.page import check_plotly, make_document, make_page, make_panels
from stormo.telemetry.folder import RunFolder, write_whole
from stormo.telemetry.runs_folder import find_run
from stormo.telemetry.text import write_text


def main(arguments: Sequence[str]) -> int:
    """Write the page, and the CSV and PNG files that were asked for."""
    parser = Parser(
        prog="stormo report",
        description="Write one HTML page of a run, or one that compares several. It opens without a network.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="name of a run, or its folder")
    parser.add_argument("--runs-folder", default="runs", metavar="FOLDER", help="folder of all runs (default: runs)")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="page to write (default: report.html in the run's folder; of several runs, in the folder of all runs)",
    )
    parser.add_argument("--csv", metavar="FOLDER", help="write every series and table as CSV files too")
    parser.add_argument("--png", metavar="FOLDER", help="write every figure as a PNG too (needs stormo[plot])")
    asked = parser.parse_args(list(arguments))
    check_plotly()
    if asked.png is not None:
        check_matplotlib()
    for option in ("output", "csv", "png"):
        if getattr(asked, option) == "":
            raise SettingError(f"--{option} was set to an empty name", "a name is needed", "name a file or folder")
    parent = Path(asked.runs_folder)
    folders = list({run.path.resolve(): run for run in (find_run(parent, name) for name in asked.runs)}.values())
    labels = run_labels(folders)
    histories = [Reader(folder, label).read() for folder, label in zip(folders, labels, strict=True)]
    default = folders[0].path / "report.html" if len(folders) == 1 else parent / "report.html"
    output = Path(asked.output) if asked.output is not None else default
    _write(asked.output is not None, output, make_page(make_document(histories)))
    lines = [f"page      {output}  ({output.stat().st_size / 1e6:.1f} MB; opens without a network)"]
    for option, name, write in (("--csv", asked.csv, write_csv), ("--png", asked.png, write_png)):
        if name is not None:
            try:
                written = write(Path(name), make_panels(histories), labels)
            except OSError as error:
                raise _cannot_write(f"{option} {name} was set", error, "name another place") from None
            lines.append(f"{option[2:]:9} {name}  ({counted(len(written), 'file')})")
    write_text("".join(f"{line}\n" for line in lines), sys.stdout)
    return 0


def run_labels(folders: Sequence[RunFolder]) -> list[str]:
    """The names of the runs, or their paths where names are equal."""
    names = [folder.name for folder in folders]
    return [str(folder.path) if names.count(name) > 1 else name for folder, name in zip(folders, names, strict=True)]


def _write(is_asked: bool, path: Path, text: str) -> None:
    what = f"--output {path} was set" if is_asked else f"the page would be {path}"
    instead = "name another file" if is_asked else "name another file with --output"
    if path.exists() and not path.is_file() and not path.is_dir():
        # Root could replace a device by the file.
        raise SettingError(what, "it is not an ordinary file", instead)
    try:
        write_whole(path, text)
    except OSError as error:
        raise _cannot_write(what, error, instead) from None


def _cannot_write(what: str, error: OSError, instead: str) -> SettingError:
    return SettingError(what, f"it cannot be written ({error.strerror})", instead)
