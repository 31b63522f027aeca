"""Makes the goldens of block drafters with DFlash's own code, in an environment of its own:

    pip install torch==2.13.0 transformers==5.15.0 safetensors
    pip install --no-deps dflash==0.1.0
    python tests/goldens/make_dflash.py [FOLDER [SEED]]     by default this one, 0

Stored are, for each case, the names and shapes that it wrote, and

    float32.hidden   [blocks, D - 1, width], what the head reads, for blocks behind a context that
    bfloat16.hidden  grows, on the features of cases.py
    text             its own loop, greedy, with a Qwen3.5 target in float32
    blocks, kept     of every block of that loop that has room for all of its tokens the anchor and
                     the drafts, and how many of these were kept
"""

import importlib.metadata
import json
import os
import tempfile
from pathlib import Path

import cases
import make
import torch
import transformers
from dflash import model as dflash
from safetensors.torch import save_file

TARGET = "Qwen3_5ForCausalLM"


@torch.no_grad()
def hidden(drafter, target, seed: int) -> torch.Tensor:
  states = [torch.from_numpy(cases.residual(i, seed)).to(drafter.dtype) for i in range(5)]
  features = dflash.extract_context_feature(states, drafter.target_layer_ids)
  cache, before, found = dflash._make_cache(drafter.config), 0, []
  for context, anchor in zip(cases.CONTEXTS, cases.ANCHORS, strict=True):
    block = torch.tensor([[anchor] + [drafter.mask_token_id] * (drafter.block_size - 1)])
    out = drafter(
      position_ids=torch.arange(before, context + drafter.block_size)[None],
      noise_embedding=dflash._raw_input_embeddings(target, block),
      target_hidden=features[:, before:context],
      past_key_values=cache,
      use_cache=True,
    )
    dflash._crop_to(cache, context)
    found.append(out[0, 1:])
    before = context
  return torch.stack(found)


class Rereading(torch.nn.Module):
  """A target that reads all of its text for every window, and remembers the windows. What is
  cropped here are rows of nothing: transformers 5.15.0 crops keys, values and convolution inputs,
  and leaves the recurrent states where the rejected tokens have brought them."""

  def __init__(self, model):
    super().__init__()
    self.model, self.text, self.windows = model, torch.zeros(1, 0, dtype=torch.long), []
    self.config, self.lm_head = dflash.Qwen3Config(num_hidden_layers=1), model.lm_head
    self.device, self.get_input_embeddings = model.device, model.get_input_embeddings

  def forward(self, ids, position_ids, past_key_values, logits_to_keep=None, **_):
    start, n = int(position_ids[0, 0]), ids.shape[1]
    self.windows.append((start, ids[0].clone()))
    self.text = torch.cat([self.text[:, :start], ids], dim=1)
    past_key_values.update(*torch.zeros(2, 1, 1, n, 1), 0)
    out = self.model(self.text, use_cache=False, output_hidden_states=True)
    out.logits = out.logits[:, -(logits_to_keep or n) :]
    out.hidden_states = [x[:, -n:] for x in out.hidden_states]
    return out


def generated(drafter, target, seed: int) -> dict[str, torch.Tensor]:
  target = Rereading(target)
  prompt = cases.raw("prompt", cases.DFLASH_PROMPT, seed) % cases.DFLASH["vocab_size"]
  text = drafter.spec_generate(target, torch.from_numpy(prompt)[None], cases.DECODED, None)[0]
  starts, windows = zip(*target.windows[1:], strict=True)  # the first is the prompt
  kept = torch.tensor([*starts, len(text) - 1]).diff()
  room = len(prompt) + cases.DECODED - drafter.block_size
  whole = sum(start < room for start in starts)  # later ones are cut, or what is kept of them is
  blocks = torch.stack(windows[:whole])
  return {"text": text.int(), "blocks": blocks.int(), "kept": kept[:whole].int()}


def golden(name: str, out: Path, seed: int) -> None:
  cls = dflash.DFlashDraftModel
  with tempfile.TemporaryDirectory() as own, tempfile.TemporaryDirectory() as other:
    shapes = make.write(
      cls(cls.config_class(**cases.DFLASH, **cases.DFLASH_CASES[name])), own, seed
    )
    of_target = make.write(make.fresh(TARGET, dict(cases.DFLASH_TARGET)), other, seed)
    config, target_config = (
      json.loads((Path(folder) / "config.json").read_text()) for folder in (own, other)
    )
    both = lambda dtype: (
      make.read(cls, own, dtype),
      make.read(getattr(transformers, TARGET), other, dtype, attn_implementation="eager"),
    )
    found = generated(*both(torch.float32), seed)
    for label, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
      found[f"{label}.hidden"] = hidden(*both(dtype), seed)
  about = {
    "config": config,
    "shapes": shapes,
    "target": {"config": target_config, "shapes": of_target},
    "seed": seed,
    "versions": {**make.VERSIONS, "dflash": importlib.metadata.version("dflash")},
  }
  save_file(found, out / f"{name}.safetensors", metadata={"about": json.dumps(about)})


def main(out: Path, seed: int) -> None:
  torch.manual_seed(0)
  torch.set_num_threads(1)
  os.makedirs(out, exist_ok=True)
  for name in cases.DFLASH_CASES:
    golden(name, out, seed)


if __name__ == "__main__":
  main(*make.arguments())
