"""Type annotations with shapes: ``Float[Tensor, "batch heads length head_dim"]``.

They are jaxtyping's if jaxtyping has been imported before (the tests do so, and check shapes at run time), otherwise
the plain tensor type, because the library itself depends on torch only.
"""

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
