"""Quantised checkpoints of tiny models, and their float twins: what the files mean, in float32.

compressed-tensors files are made and read back by that library. For GPTQ, AWQ and FP8 there is none
to be had: files are packed by the written formats, and twins are unpacked again word by word, by
plain loops that share no code with what packs, nor with the engine.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

from kernels.quantized import Rounding, quantize

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FP8_MAX = 448.0


def save_quantized(model_dir: Path, target: Path, kind: str) -> tuple[Path, Path]:
    """Write a quantised checkpoint of a float one, and its twin; return both folders."""
    make, config = KINDS[kind]
    tensors, meant = {}, {}
    for name, tensor in load_file(model_dir / "model.safetensors").items():
        module, _, end = name.rpartition(".")
        if end == "weight" and module.endswith("_proj"):
            files, meant[name] = make(tensor)
            tensors |= {f"{module}.{key}": value.contiguous() for key, value in files.items()}
        else:
            tensors[name] = meant[name] = tensor
    folders = target / "quantized", target / "twin"
    for folder, content in zip(folders, (tensors, meant), strict=True):
        shutil.copytree(model_dir, folder)
        save_file(content, folder / "model.safetensors", {"format": "pt"})
    path = folders[0] / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return folders


# ---- GPTQ and AWQ ----


def _pack(codes: np.ndarray) -> np.ndarray:
    """[n, m] codes of 4 bits -> [n / 8, m] words, the lowest bits first."""
    words = np.zeros((len(codes) // 8, codes.shape[1]), np.uint32)
    for place in range(8):
        words |= codes[place::8].astype(np.uint32) << np.uint32(4 * place)
    return words.view(np.int32)


def gptq_files(codes, scales, zeros, g_idx, least_zero=1):
    """Tensors of a module.   codes: [out, in] 0 to 15, scales and zeros: [out, groups]."""
    stored = (zeros.numpy().T - least_zero) % 16
    return {
        "qweight": torch.from_numpy(_pack(codes.numpy().T)),
        "qzeros": torch.from_numpy(_pack(stored.T).T),
        "scales": scales.T.half(),
        "g_idx": g_idx.int(),
    }


def _rounded(weight, size, has_zeros):
    """Codes and zeros from 0 to 15, and scales that float16 holds."""
    whole = torch.nn.functional.pad(weight, (0, -weight.shape[1] % size))
    found = quantize(whole, Rounding(4, size, has_zeros))
    zeros = torch.zeros_like(found.scales) if found.zeros is None else found.zeros
    return found.codes[:, : weight.shape[1]].int() + 8, found.scales.half().float(), zeros.int() + 8


def _gptq(size, has_zeros=False, least_zero=1, is_shuffled=False):
    def make(weight):
        order = torch.arange(weight.shape[1])
        if is_shuffled:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(3))
        codes, scales, zeros = _rounded(weight[:, order], size, has_zeros)
        g_idx = torch.empty_like(order)
        g_idx[order] = torch.arange(len(order)) // size
        codes[:, order] = codes.clone()
        files = gptq_files(codes, scales, zeros, g_idx, least_zero)
        return files, _read_gptq(files, least_zero)

    config = {
        "quant_method": "gptq", "bits": 4, "group_size": size, "sym": not has_zeros,
        "desc_act": is_shuffled, "checkpoint_format": "gptq" if least_zero else "gptq_v2",
    }  # fmt: skip
    return make, config


def _read_gptq(files, least_zero):
    words, zeros = files["qweight"].tolist(), files["qzeros"].tolist()
    scales, groups = files["scales"].float().tolist(), files["g_idx"].tolist()
    weight = torch.empty(len(words[0]), 8 * len(words))
    for k in range(weight.shape[1]):
        for n in range(len(weight)):
            code = words[k // 8][n] >> (4 * (k % 8)) & 15
            zero = (zeros[groups[k]][n // 8] >> (4 * (n % 8)) & 15) + least_zero
            weight[n, k] = (code - zero) * scales[groups[k]][n]
    return weight


def _awq(size):
    def make(weight):
        codes, scales, zeros = _rounded(weight, size, has_zeros=True)
        files = {
            "qweight": torch.from_numpy(_pack(_awq_order(codes.numpy().T).T).T),
            "qzeros": torch.from_numpy(_pack(_awq_order(zeros.numpy().T).T).T),
            "scales": scales.T.half(),
        }
        return files, _read_awq(files, size)

    config = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True,
              "version": "gemm"}  # fmt: skip
    return make, config


def _awq_order(codes: np.ndarray) -> np.ndarray:
    """Outputs of [n, out] in the order in which a word holds them."""
    return codes.reshape(len(codes), -1, 8)[:, :, list(AWQ_ORDER)].reshape(codes.shape)


def _read_awq(files, size):
    words, zeros = files["qweight"].tolist(), files["qzeros"].tolist()
    scales = files["scales"].float().tolist()
    weight = torch.empty(8 * len(words[0]), len(words))
    for k in range(weight.shape[1]):
        for n in range(len(weight)):
            shift = 4 * AWQ_ORDER.index(n % 8)
            code = words[k][n // 8] >> shift & 15
            zero = zeros[k // size][n // 8] >> shift & 15
            weight[n, k] = (code - zero) * scales[k // size][n]
    return weight


# ---- FP8 ----


def _fp8_block(rows, columns):
    def make(weight):
        num_outputs, num_inputs = weight.shape
        codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        scales = torch.empty(-(-num_outputs // rows), -(-num_inputs // columns))
        meant = torch.empty_like(weight)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scales[i, j] = weight[at].abs().max() / FP8_MAX
                codes[at] = (weight[at] / scales[i, j]).to(codes.dtype)
                meant[at] = codes[at].float() * scales[i, j]
        return {"weight": codes, "weight_scale_inv": scales}, meant

    config = {"quant_method": "fp8", "weight_block_size": [rows, columns],
              "activation_scheme": "dynamic"}  # fmt: skip
    return make, config


def _fp8_tensor(weight):
    scale = weight.abs().max() / FP8_MAX
    codes = (weight / scale).to(torch.float8_e4m3fn)
    files = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.1)}
    return files, codes.float() * scale


# ---- compressed-tensors ----


def _compressed(form, activations=None, **weights):
    scheme = QuantizationScheme(
        targets=["Linear"], weights=weights, input_activations=activations, format=form
    )

    def make(weight):
        size = weights.get("group_size") or weight.shape[1]
        groups = weight.view(len(weight), -1, size)
        if weights["strategy"] == "block":
            rows, columns = weights["block_structure"]
            groups = weight.view(len(weight) // rows, rows, -1, columns).transpose(1, 2)
            groups = groups.flatten(2)
        elif weights["strategy"] == "tensor":
            groups = weight.view(1, 1, -1)
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        compressor = BaseCompressor.get_value_from_registry(form)
        files = compressor.compress(state, scheme)
        return files, compressor.decompress(files, scheme)["weight"]

    group = json.loads(scheme.model_dump_json())
    config = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
              "config_groups": {"group_0": group}, "quantization_status": "compressed"}  # fmt: skip
    return make, config


_BYTES = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}

KINDS = {
    "gptq": _gptq(32),
    "gptq zeros": _gptq(32, has_zeros=True),
    "gptq v2": _gptq(64, has_zeros=True, least_zero=0),
    "gptq act-order": _gptq(32, is_shuffled=True),
    "awq": _awq(32),
    "fp8 block": _fp8_block(48, 32),
    "fp8 tensor": (_fp8_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
    "W4A16": _compressed(
        "pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=True
    ),
    "W4A16 zeros": _compressed(
        "pack-quantized", num_bits=4, type="int", strategy="group", group_size=64, symmetric=False
    ),
    "W4A16 channel": _compressed(
        "pack-quantized", num_bits=4, type="int", strategy="channel", symmetric=True
    ),
    "W8A16 groups": _compressed(
        "pack-quantized", num_bits=8, type="int", strategy="group", group_size=64, symmetric=True
    ),
    "W8A8": _compressed(
        "int-quantized", _BYTES, num_bits=8, type="int", strategy="channel", symmetric=True
    ),
    "FP8": _compressed(
        "float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True
    ),
    "FP8 tensor": _compressed(
        "float-quantized", num_bits=8, type="float", strategy="tensor", symmetric=True
    ),
    "FP8 block": _compressed(
        "float-quantized", num_bits=8, type="float", strategy="block", symmetric=True,
        block_structure=[32, 64],
    ),
}  # fmt: skip
"""How a module's tensors are made of its weight, and the quantization_config, by name."""
