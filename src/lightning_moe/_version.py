"""The version, alone in a file so that packaging need not import torch."""

__version__ = "0.1.0"
