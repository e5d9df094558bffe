"""Where Triton's kernels run: on the GPU where there is one, else interpreted on CPU tensors.

`tests/conftest.py` asks for the interpreter before Triton is imported.
"""

import pytest
import torch

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter computes with numpy, which warns of overflows and infinities that are meant.
# Triton 3.6 also leans on what numpy 2.4 took away, and 3.9 announces a default of 3.10.
INTERPRETED = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning"),
]
