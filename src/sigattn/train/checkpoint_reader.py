"""Reading of a checkpoint's files without running code from them.

``torch.distributed.checkpoint`` stores its metadata and every value that is no tensor as pickles, and an unrestricted
unpickler calls whatever function a pickle names. The classes here replace both unpicklers.
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

# every class and function that the metadata of torch.distributed.checkpoint consists of
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
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,  # looks a name up in a table
}
_ALLOWED |= {("torch", str(d).removeprefix("torch.")): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
# a PurePath has no method that touches a file, and exists for every operating system
_ALLOWED |= {(m, n): PurePath for m in ("pathlib", "pathlib._local") for n in ("PosixPath", "WindowsPath")}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"its metadata asks for {module} {name}, which no checkpoint needs") from None


def unpickle_metadata(content: bytes) -> Metadata:
    """Return the metadata of a checkpoint from its pickle.

    Raises:
        pickle.UnpicklingError: if the pickle names a class or function that metadata does not consist of, is damaged,
            or refers to files outside the checkpoint.
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
    """``FileSystemReader`` that unpickles nothing but metadata."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata, as ``FileSystemReader`` does."""
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            metadata = unpickle_metadata(file.read())
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class CheckpointPlanner(DefaultLoadPlanner):
    """``DefaultLoadPlanner`` that reads numbers, strings and containers of them where the default reads any object."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Store a value that is no tensor in the state."""
        safe = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), safe)  # the default unpickles what it is given
        safe.seek(0)
        super().load_bytes(read_item, safe)
