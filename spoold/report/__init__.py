"""A run directory as one page with plots: what happened, from what lies on the disk.

`gather` reads names, times, sample lines and notes; `charts` draws; `page` puts it together. The
page is one file that loads nothing from anywhere and holds no script.
"""

from __future__ import annotations

from spoold.report.gather import Gathered, gather
from spoold.report.page import page

__all__ = ["Gathered", "gather", "page"]
