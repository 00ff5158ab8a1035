"""The pages in docs/ say what the program does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_page_of_the_command_line_is_what_the_command_line_says() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "docs"), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
