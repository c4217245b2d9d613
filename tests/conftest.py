"""What every test finds set up."""

import torch

torch.set_num_threads(1)  # the processes that the tests start share the cores with this one
