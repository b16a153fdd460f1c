"""A Hugging Face folder of safetensors files as a source of tensors: single or sharded, plain or in blocks of fp8.

Shapes: N outputs, K inputs of a matrix; one scale for every block of rows and columns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from workbench.errors import InvalidInput, choices
from workbench.models.network.shapes import NetworkConfig
from workbench.models.network.stored import StoredTensors

INDEX = "model.safetensors.index.json"
SCALE = "_scale_inv"
PLAIN = ("F32", "BF16", "F16")
_FP8 = "F8_E4M3"
_ALLOWED = f"{choices(PLAIN)}, or fp8 in blocks as DeepSeek ships it, is allowed"


class SafetensorsSource(StoredTensors):
    """Tensors of a folder, read one at a time; nothing but the headers is read before `get`.

    A matrix `X.weight` of e4m3 is given dequantised, in float32: every value times the number in `X.weight_scale_inv`
    (float32 or bfloat16 `[ceil(N / rows), ceil(K / columns)]`) for its block, whose size config.json has under
    `quantization_config`. Blocks at the ends of a matrix may be cut.

    Attributes:
        block: rows and columns of a block; None where the checkpoint is not quantised.
    """

    def __init__(self, folder: Path, config: NetworkConfig, device: torch.device | str) -> None:
        """Open every file.

        Args:
            folder: with a config.json, and safetensors files that an index lists or that are all there are.
            config: names the model in sentences.
            device: where tensors are given.

        Raises:
            InvalidInput: a file that is missing, cut short or no safetensors file (all of them are named), a tensor
                in two files, or a quantisation that is not read.
        """
        self.folder, self._device = folder, torch.device(device)
        self.label = str(folder)
        self.block = _block(folder, config.name)
        self.quantized = self.block is not None
        self._files: dict[str, Any] = {}
        self._places: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        names, placed = _listed(folder)
        self._open(names)
        self._read_headers(placed)
        self._scales = {
            name: self._shapes.pop(name) for name in list(self._shapes) if name.endswith(SCALE) and self.quantized
        }
        self.kinds = ", ".join(sorted({self._dtypes[name] for name in self._shapes}))

    def _open(self, names: Sequence[str]) -> None:
        bad = []
        for name in names:
            try:
                self._files[name] = safe_open(str(self.folder / name), framework="pt", device=str(self._device))
            except FileNotFoundError:
                bad.append(f"{name} is missing")
            except (OSError, SafetensorError) as error:
                bad.append(f"{name} cannot be read ({' '.join(str(error).split())})")
        if bad:
            raise InvalidInput(f"model: of the safetensors files of {self.folder}, {'; '.join(bad)}")

    def _read_headers(self, placed: Mapping[str, str]) -> None:
        for file, opened in self._files.items():
            for name in opened.keys():  # noqa: SIM118
                if name in self._places:
                    if name not in placed:
                        both = choices((self._places[name], file)).replace(" or ", " and ")
                        raise InvalidInput(
                            f"model: {name} is in {both} of {self.folder}, and no index says which counts"
                        )
                    if placed[name] != file:
                        continue
                view = opened.get_slice(name)
                self._places[name] = file
                self._shapes[name] = tuple(view.get_shape())
                self._dtypes[name] = str(view.get_dtype())

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See the base class; the scales of blocks count with their matrices."""
        return self._shapes

    def faults(self) -> Mapping[str, str]:
        """See the base class."""
        found = {}
        for name, shape in self._shapes.items():
            dtype, scale = self._dtypes[name], name + SCALE
            if dtype in PLAIN:
                if scale in self._scales:
                    found[scale] = f"stands beside a matrix of {dtype}, which has no scales"
            elif dtype != _FP8:
                found[name] = f"is {dtype}; {_ALLOWED}"
            elif self.block is None:
                found[name] = f"is {dtype}, and quantization_config in config.json says no weight_block_size"
            elif len(shape) != 2:
                found[name] = f"is {dtype} {list(shape)}; matrices alone have blocks"
            else:
                wanted = (-(-shape[0] // self.block[0]), -(-shape[1] // self.block[1]))
                if scale not in self._scales:
                    found[scale] = f"is missing, must be {list(wanted)}"
                elif self._scales[scale] != wanted:
                    found[scale] = f"is {list(self._scales[scale])}, must be {list(wanted)}"
                elif self._dtypes[scale] not in PLAIN:
                    found[scale] = f"is {self._dtypes[scale]}; {choices(PLAIN)} is allowed"
        for scale in self._scales:
            if scale.removesuffix(SCALE) not in self._shapes:
                found[scale] = "has no matrix beside it"
        return found

    def get(self, name: str) -> torch.Tensor:
        """See the base class; a copy, which does not follow the file.

        Raises:
            InvalidInput: a value that is not finite, or a block's scale that is not finite and above 0 (0 is allowed
                where all values of its block are 0).
        """
        if name not in self._shapes:
            raise KeyError(name)
        data = self._read(name)
        if self._dtypes[name] != _FP8:
            return self.finite(data, name)
        assert self.block is not None
        return self.finite(dequantized(data, self._read(name + SCALE), self.block, f"{name} of {self.label}"), name)

    def _read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[self._places[name]].get_tensor(name)
        # On the CPU it is a view of the file, which would be read at first use, and again where memory is short.
        return tensor.clone() if tensor.device.type == "cpu" else tensor


def dequantized(data_NK: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], label: str) -> torch.Tensor:
    """Values in blocks times their scales: float32 `[N, K]`.

    With blocks of 128 x 128 a matrix `[130, 200]` has scales `[2, 2]`: element (129, 150) is multiplied by scale[1, 1].

    Args:
        data_NK: `[N, K]`, e4m3.
        scale: `[ceil(N / rows), ceil(K / columns)]`.
        block: rows and columns.
        label: names the matrix in a sentence.

    Raises:
        InvalidInput: a scale that is not finite and above 0, as `SafetensorsSource.get` says.
    """
    rows, columns = data_NK.shape
    scale = scale.to(torch.float32)
    scale_NK = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    values_NK = data_NK.to(torch.float32)
    # A scale that is not a number fails every comparison.
    bad_NK = ~((scale_NK > 0) & (scale_NK < torch.inf) | (scale_NK == 0) & (values_NK == 0))
    if bool(bad_NK.any()):
        row, column = (int(at) // width for at, width in zip(bad_NK.nonzero()[0], block, strict=True))
        raise InvalidInput(
            f"model: every weight_scale_inv of {label} must be finite and above 0; that of block [{row}, {column}] is "
            f"{float(scale[row, column]):g}"
        )
    return values_NK * scale_NK


def _listed(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Names of the files that count, and which of them holds a tensor where an index says so."""
    index = folder / INDEX
    if not index.is_file():
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        if not names:
            raise InvalidInput(f"model: {folder} must hold safetensors files, and has none")
        return names, {}
    try:
        placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        plain = {str(name): str(file) for name, file in placed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(f"model: {index} cannot be read as an index of safetensors files ({error!r})") from None
    names = sorted(set(plain.values()))
    outside = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
    if outside or not names:
        what = f"names {outside[0]}" if outside else "names none"
        raise InvalidInput(f"model: {index} must name safetensors files beside it; it {what}")
    return names, plain


def _block(folder: Path, name: str) -> tuple[int, int] | None:
    """Rows and columns of a block of the checkpoint's quantisation; None where it has none."""
    try:
        data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"model: {folder / 'config.json'} cannot be read as a config.json ({error})") from None
    nested = data.get("text_config") if isinstance(data, dict) else None
    how = data.get("quantization_config") or (nested or {}).get("quantization_config")
    if not how:
        return None
    method, size = (how.get("quant_method"), how.get("weight_block_size")) if isinstance(how, dict) else (how, None)
    if method != "fp8" or how.get("fmt", "e4m3") != "e4m3":
        raise InvalidInput(f"model: the quantisation of {name}, {method}, is not read; {_ALLOWED}")
    if (
        not isinstance(size, list)
        or len(size) != 2
        or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in size)
    ):
        raise InvalidInput(
            f"model: quantization_config.weight_block_size of {name} must be two whole numbers, rows and columns of a "
            f"block, not {size!r}"
        )
    return size[0], size[1]
