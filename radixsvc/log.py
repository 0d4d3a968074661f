"""Logs on stderr: text for people, JSON for programs, or journald's priority prefix.

Nothing that a client wrote or a model answered is ever logged, only ids, counts and times.
"""

from __future__ import annotations

import json
import logging
import os
import sys

PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3}


class _Journald(logging.Formatter):
    """Lines with sd-daemon(3)'s "<N>" prefix; the journal adds time and unit itself."""

    def format(self, record: logging.LogRecord) -> str:
        prefix = f"<{PRIORITIES.get(record.levelno, 2)}>"
        return "\n".join(prefix + line for line in super().format(record).splitlines())


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def setup(level: str, form: str) -> None:
    """Send all logs to stderr in this form: auto, text, json or journald."""
    handler = logging.StreamHandler(sys.stderr)
    if form == "auto":
        form = "journald" if "JOURNAL_STREAM" in os.environ else "text"
    if form == "json":
        handler.setFormatter(_Json())
    elif form == "journald":
        handler.setFormatter(_Journald("%(name)s: %(message)s"))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    # It logs what it can't parse, and that is what a client wrote.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
