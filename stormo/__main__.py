"""`python -m stormo` is the command `stormo`."""

import sys

if __name__ == "__main__":  # loader processes import this module again
    import os

    # `-m` puts the current folder first on the path, where anybody's safetensors.py would be imported instead of the
    # real one. What belongs to a user's own task is added where that is imported.
    if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):  # noqa: PTH109 - before anything is imported
        del sys.path[0]
        from pathlib import Path

        root = Path(__file__).resolve().parents[1]
        if root == Path.cwd() and str(root) not in sys.path:  # a checkout that is not installed: workers must find it
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(root)]))

    from stormo.cli import main

    sys.exit(main())
