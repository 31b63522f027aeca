"""Makes the goldens with torch and transformers, in an environment of its own:

    pip install torch transformers safetensors einops && pip install --no-deps fla-core
    python tests/goldens/make.py [FOLDER [SEED]]     by default this one, 0

Each case is a folder that transformers itself writes and reads, with the weights of cases.py.
Stored are the names and shapes that it wrote, and in float32 and bfloat16 the logits of the prompt
and of 64 decode steps, and the recurrent and convolution states of every layer after either.
"""

import importlib.metadata
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import save_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import cases  # noqa: E402

VISION = {
  "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
  "num_position_embeddings": 16, "patch_size": 4,
}  # fmt: skip
VERSIONS = {"torch": torch.__version__, "transformers": transformers.__version__}


def fresh(architecture: str, fields: dict):
  """A model with random weights, for its names and shapes."""
  cls = getattr(transformers, architecture)
  if architecture.endswith("ForConditionalGeneration"):
    tied = fields["tie_word_embeddings"]
    return cls(cls.config_class(text_config=fields, vision_config=VISION, tie_word_embeddings=tied))
  return cls(cls.config_class(**fields))


def write(model, folder: str, seed: int) -> dict[str, tuple[int, ...]]:
  """The model's folder with the weights of cases.py in it; names and shapes of the tensors."""
  model.save_pretrained(folder)
  path = Path(folder) / "model.safetensors"
  with safe_open(path, framework="np") as file:
    shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
  save_numpy(
    {n: cases.weight(n, s, seed) for n, s in shapes.items()}, path, metadata={"format": "pt"}
  )
  return shapes


def states(cache, config, prefix: str) -> dict[str, torch.Tensor]:
  """[B, H, K, V] and [B, C, taps] of every recurrent layer."""
  found = {}
  for i, kind in enumerate(config.layer_types):
    if kind == "linear_attention":
      found[f"{prefix}.state.{i}"] = cache.get_recurrent_state(i, state_idx=0).float().clone()
      found[f"{prefix}.conv.{i}"] = cache.get_conv_state(i, state_idx=0).clone()
  return found


def read(cls, folder: str, dtype: torch.dtype, **more):
  """The folder's model. ValueError: it lacks tensors, or has others."""
  model, info = cls.from_pretrained(folder, dtype=dtype, output_loading_info=True, **more)
  lost = {kind: names for kind, names in info.items() if names and kind != "error_msgs"}
  if lost:
    raise ValueError(f"{cls.__name__} is read differently: {lost}")
  return model.eval()


@torch.no_grad()
def run(folder: str, architecture: str, dtype: torch.dtype, ids: torch.Tensor):
  model = read(getattr(transformers, architecture), folder, dtype, attn_implementation="eager")
  config, n = model.config.get_text_config(), cases.PROMPT
  out = model(input_ids=ids[:, :n], use_cache=True)
  found = states(out.cache, config, "prompt")
  logits = [out.logits]
  for t in range(n, ids.shape[1]):
    out = model(input_ids=ids[:, t : t + 1], cache=out.cache, use_cache=True)
    logits.append(out.logits)
  found |= states(out.cache, config, "decoded")
  return {"logits": torch.cat(logits, dim=1), **found}


def model_golden(name: str, out: Path, seed: int) -> None:
  architecture, fields = cases.CASES[name]
  ids = torch.from_numpy(cases.ids(name, seed))
  with tempfile.TemporaryDirectory() as folder:
    shapes = write(fresh(architecture, {**cases.SIZES, **fields}), folder, seed)
    config = (Path(folder) / "config.json").read_text()
    found = {"ids": ids.int()}
    for label, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
      for key, x in run(folder, architecture, dtype, ids).items():
        found[f"{label}.{key}"] = x.contiguous()
  about = {"config": json.loads(config), "shapes": shapes, "seed": seed, "versions": VERSIONS}
  save_file(found, out / f"{name}.safetensors", metadata={"about": json.dumps(about)})


def naive():
  """flash-linear-attention's pure torch functions, without its package: that wants triton."""
  [root] = importlib.util.find_spec("fla").submodule_search_locations
  path = Path(root) / "ops" / "gated_delta_rule" / "naive.py"
  spec = importlib.util.spec_from_file_location("naive", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def layer_golden(out: Path, seed: int) -> None:
  """Both naive functions of flash-linear-attention on normed q and k, and its printed gate."""
  B, T, H, K, V = 2, 70, 4, 16, 8
  draw = lambda name, *shape: torch.from_numpy(
    (cases.raw(name, int(np.prod(shape)), seed) / 64).astype(np.float32).reshape(shape)
  )
  unit = lambda x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
  x = {
    "q": draw("q", B, T, H, K), "k": draw("k", B, T, H, K), "v": draw("v", B, T, H, V),
    "a": draw("a", B, T, H), "b": draw("b", B, T, H), "A_log": draw("A_log", H),
    "dt_bias": draw("dt_bias", H), "S": draw("S", B, H, K, V),
  }  # fmt: skip
  # g = -exp(A_log) softplus(a + dt_bias): fla/ops/gated_delta_rule/gate.py
  g = -x["A_log"].exp() * torch.nn.functional.softplus(x["a"] + x["dt_bias"])
  tokens = {
    "q": unit(x["q"]), "k": unit(x["k"]), "v": x["v"], "g": g, "beta": x["b"].sigmoid(),
    "initial_state": x["S"], "output_final_state": True,
  }  # fmt: skip
  module = naive()
  recurrent = module.naive_recurrent_gated_delta_rule(**tokens)
  chunked = module.naive_chunk_gated_delta_rule(**tokens)
  x |= {"recurrent.o": recurrent[0], "recurrent.S": recurrent[1]}
  x |= {"chunked.o": chunked[0], "chunked.S": chunked[1]}
  about = {
    "versions": {"torch": torch.__version__, "fla-core": importlib.metadata.version("fla-core")}
  }
  save_file(
    {name: value.contiguous() for name, value in x.items()},
    out / "fla_gated_delta_rule.safetensors",
    metadata={"about": json.dumps(about)},
  )


def main(out: Path, seed: int) -> None:
  torch.manual_seed(0)
  torch.set_num_threads(1)
  os.makedirs(out, exist_ok=True)
  layer_golden(out, seed)
  for name in cases.CASES:
    model_golden(name, out, seed)
    print(name)


def arguments() -> tuple[Path, int]:
  folder, seed = [*sys.argv[1:], *(str(HERE), "0")[len(sys.argv) - 1 :]]
  return Path(folder), int(seed)


if __name__ == "__main__":
  main(*arguments())
