"""The legend of the axis letters used in every array annotation.

    B  lanes (batch positions)          N  blocks in the pool
    T  query tokens of a step           S  slots per block
    L  layers                           W  block-table width, in blocks
    H  query heads (H = K * G)          C  context, in tokens (C = W * S)
    K  key/value heads                  M  model width
    G  query heads per key/value head   V  vocabulary
    D  head width                       D2 half of it
    P  prefill tiles of a step          E  biased token ids of a lane
    A  alternatives of a token          J  bad words of a lane
    Q  tokens of a bad word
    I  input width of a linear map      O  its output width
    R  rows of any shape                X  what the line itself says

Arrays are annotated with jaxtyping, as `Float[Array, "T H D"]`; the test run checks every call.
"""

import numpy as np
from jaxtyping import Array

AnyArray = Array | np.ndarray
"""An argument of a step: made on the host, traced or placed by the step."""
