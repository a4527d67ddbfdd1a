"""Shapes as types: ``Float[Tensor, "batch heads length head_dim"]``.

They are jaxtyping's where jaxtyping has been imported (as the tests do, which check them at run time), and otherwise
just the tensor: the library itself needs torch alone.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or sys.modules.get("jaxtyping") is not None:
    from jaxtyping import Float as Float
    from jaxtyping import Int as Int
else:

    class _Unchecked:
        def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
            return item[0]

    Float = Int = _Unchecked
