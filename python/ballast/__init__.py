"""Mixed-precision tools for hybrid Gated-DeltaNet language models whose critical tensors stay f32.

- `ballast.contract`: which tensors must be f32, and why.
- `ballast.errors`: the exceptions.

Neither torch nor numpy is needed.
"""

from ballast import contract
from ballast._native import VERSION as __version__
from ballast.errors import BallastError

__all__ = ["BallastError", "__version__", "contract"]
