"""Array types by what they hold: a signature says whether numbers are data (float32) or measurements (float64)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Float32Array = NDArray[np.float32]  # vectors, tables as published
Float64Array = NDArray[np.float64]  # codebooks while they are solved, measurements
FloatArray = NDArray[Any]  # float16, bfloat16, float32 or float64, as the caller has it: NumPy has no type for that
AnyArray = NDArray[np.generic]  # what a file holds, of any type
