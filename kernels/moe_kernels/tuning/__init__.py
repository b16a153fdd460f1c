"""Tuned tile configurations in files: which folders are read, and what a file says. Neither torch nor triton is needed.

Files have SGLang's or vLLM's names and rows; ``_modes`` files beside them hold the whole configuration that these
kernels take. ``find_config`` picks the row for a problem and says which one, or why none.
"""

from moe_kernels.tuning.folders import PACKAGED as PACKAGED
from moe_kernels.tuning.folders import add_config_folder as add_config_folder
from moe_kernels.tuning.folders import config_folders as config_folders
from moe_kernels.tuning.folders import remove_config_folder as remove_config_folder
from moe_kernels.tuning.lookup import Found as Found
from moe_kernels.tuning.lookup import find_config as find_config
from moe_kernels.tuning.names import Problem as Problem

__all__ = [
    "PACKAGED",
    "Found",
    "Problem",
    "add_config_folder",
    "config_folders",
    "find_config",
    "remove_config_folder",
]
