"""Reader of checkpoint files that runs no code from them.

``torch.distributed.checkpoint`` stores its metadata and every value that is not a tensor as pickles, and an
unrestricted unpickler calls whatever function a pickle names. The classes here replace both unpicklers.
"""

from __future__ import annotations

import io
import pickle
from pathlib import PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

# every class and function that occurs in the metadata of torch.distributed.checkpoint
_ALLOWED: dict[tuple[str, str], Any] = {
    (kind.__module__, kind.__name__): kind
    for kind in (
        Metadata,
        StorageMeta,
        dcp_metadata.MetadataIndex,
        dcp_metadata.TensorStorageMetadata,
        dcp_metadata.TensorProperties,
        dcp_metadata.ChunkStorageMetadata,
        dcp_metadata.BytesStorageMetadata,
        dcp_metadata._MEM_FORMAT_ENCODING,
        _StorageInfo,
    )
}
_ALLOWED |= {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,  # a table lookup
}
_ALLOWED |= {("torch", str(d).removeprefix("torch.")): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
# no method of PurePath accesses a file, and it exists on every operating system
_ALLOWED |= {(m, n): PurePath for m in ("pathlib", "pathlib._local") for n in ("PosixPath", "WindowsPath")}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"its metadata names {module} {name}, which no checkpoint needs") from None


def unpickle_metadata(content: bytes) -> Metadata:
    """Return the metadata of a checkpoint from its pickle.

    Raises:
        pickle.UnpicklingError: if the pickle names a class or function that does not occur in metadata, is damaged, or
            refers to files outside the checkpoint.
    """
    metadata = _MetadataUnpickler(io.BytesIO(content)).load()
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise pickle.UnpicklingError("it has no metadata of torch.distributed.checkpoint")
    for stored in metadata.storage_data.values():
        path = getattr(stored, "relative_path", None)
        if not isinstance(path, str) or path != PurePath(path).name:
            raise pickle.UnpicklingError(f"its metadata refers to a file outside the checkpoint, {path!r}")
    return metadata


class CheckpointReader(FileSystemReader):
    """``FileSystemReader`` that unpickles only classes of checkpoint metadata."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the checkpoint, unpickled by ``unpickle_metadata``."""
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            metadata = unpickle_metadata(file.read())
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class CheckpointPlanner(DefaultLoadPlanner):
    """``DefaultLoadPlanner`` that reads numbers, strings and containers of them only, instead of any object."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a value that is not a tensor into the state."""
        safe = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), safe)  # the base class unpickles without restriction
        safe.seek(0)
        super().load_bytes(read_item, safe)
