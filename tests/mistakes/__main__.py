"""`python -m tests.mistakes` writes docs/mistakes.md anew."""

from __future__ import annotations

from tests.mistakes.page import PAGE, page

PAGE.write_text(page(), encoding="utf-8")
