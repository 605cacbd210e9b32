"""torch, for modules that cannot be imported without it."""

from ballast._extras import missing

try:
    import torch as torch
except ModuleNotFoundError as error:
    raise missing(error) from None
