"""Sends the trained weights to a server before it samples, and makes sure that it samples from them."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from titan_tree.checkpoint.export import gathered_weights
from titan_tree.errors import UserError
from titan_tree.models.lora.peft import save_adapter
from titan_tree.models.pretrained import save_pretrained
from titan_tree.models.tree_model import TreeModel
from titan_tree.rl.server.engines import Engine

logger = logging.getLogger(__name__)


class Served(NamedTuple):
    """What a server samples from.

    Attributes:
        version: the name of the weights that the server must report; None: it need not report one.
        adapter: the name of the adapter that requests must ask for; None: they ask for the model itself.
    """

    version: str | None = None
    adapter: str | None = None


def check_version(url: str, got: object, expected: str) -> None:
    """Raises UserError if the server reports other weights than those of the version ``expected``."""
    if got not in (None, expected):
        raise UserError(
            f"{url}: weight version: expected {expected!r}, which this run sent, got {got!r}; does another "
            "program send weights to this server?"
        )


class WeightPush(Protocol):
    """Sends weights to a server."""

    def __call__(self, model: TreeModel, step: int) -> Served:
        """Sends the weights of ``model`` after ``step`` optimizer steps.

        Raises:
            UserError: the server did not take them over.
        """
        ...

    def check(self, version: str) -> None:
        """Raises UserError if the server reports that it has other weights than ``version``."""
        ...

    def close(self) -> None: ...


class Transfer(Protocol):
    """Moves all weights of a model to a server that is paused."""

    def __call__(self, model: TreeModel, version: str) -> None: ...

    def close(self) -> None: ...


class ModelPush:
    """Replaces all weights of a server, which is paused meanwhile.

    If a transfer fails, the server may hold weights of two versions. It therefore stays paused until the next
    transfer.

    Args:
        run: how the names of all versions begin.
    """

    def __init__(self, engine: Engine, transfer: Transfer, run: str) -> None:
        self._engine, self._transfer, self._run = engine, transfer, run
        self._has_warned = False

    def __call__(self, model: TreeModel, step: int) -> Served:
        version = f"{self._run}-{step}"
        try:
            self._engine.pause()
            self._transfer(model, version)
            self._engine.resume(version)
        except UserError as error:
            raise UserError(
                f"weights of step {step}: the server did not take them over, and may stay paused: {error}"
            ) from None
        self.check(version)
        return Served(version)

    def check(self, version: str) -> None:
        got, url = self._engine.version(), self._engine.server.url
        check_version(url, got, version)
        if got is None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: this version of the server does not report the version of its weights, so nothing "
                "checks that it samples from the trained ones",
                url,
            )

    def close(self) -> None:
        self._transfer.close()


class FolderTransfer:
    """Writes a Hugging Face snapshot, and lets the server read it.

    Args:
        folder: gets a folder for the newest weights; earlier contents are deleted. The server must see it
            under the same path.
        dtype: of the written weights.
        source: the snapshot that the model started from, or None.
    """

    def __init__(self, engine: Engine, folder: Path, dtype: torch.dtype, source: str | None) -> None:
        self._engine, self._folder = engine, folder.resolve()
        self._dtype, self._source = dtype, source

    def __call__(self, model: TreeModel, version: str) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        folder = self._folder / version
        save_pretrained(model, folder, gathered_weights(model, self._dtype), self._source)
        self._engine.load_folder(folder)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class AdapterPush:
    """Loads LoRA as an adapter. Its name is its version, so no request gets the adapter of another step.

    Args:
        folder: as for ``FolderTransfer``.
        source: the snapshot that the model started from, or None.
        run: how the names of all adapters begin.
    """

    def __init__(self, engine: Engine, folder: Path, source: str | None, run: str) -> None:
        self._engine, self._folder = engine, folder.resolve()
        self._source, self._run = source, run
        self._loaded: str | None = None

    def __call__(self, model: TreeModel, step: int) -> Served:
        name = f"{self._run}-{step}"
        folder = self._folder / name
        shutil.rmtree(self._folder, ignore_errors=True)
        try:
            save_adapter(model, folder, source=self._source)
            if self._loaded is not None:
                self._engine.unload_adapter(self._loaded)
                self._loaded = None
            self._engine.load_adapter(name, folder)
        except UserError as error:
            raise UserError(f"adapter of step {step}: the server did not load it: {error}") from None
        self._loaded = name
        return Served(adapter=name)

    def check(self, version: str) -> None:
        """Does nothing: requests name their adapter."""

    def close(self) -> None:
        """Unloads the adapter."""
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._loaded is not None:
            try:
                self._engine.unload_adapter(self._loaded)
            except UserError as error:
                logger.warning("adapter %s stays loaded: %s", self._loaded, error)
