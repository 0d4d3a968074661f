"""Models that many tests share, built or fetched once a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from tiny import tiny_model
from transformers.utils import logging

if TYPE_CHECKING:
    from serving import RunningBackend

logging.disable_progress_bar()
torch.set_num_threads(1)  # sums in one order on every machine, and no waiting for busy cores


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random three-layer Llama. Read only."""
    return tiny_model(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def tiny(tiny_llama: Path) -> Iterator[RunningBackend]:
    """A started engine around the tiny Llama."""
    from serving import RunningBackend

    with RunningBackend(tiny_llama) as running:
        yield running


@pytest.fixture(scope="session")
def smollm() -> Path:
    """The folder of SmolLM2-135M-Instruct, fetched and converted once where it isn't cached."""
    from radixsvc.fetch import fetch

    return fetch(None)
