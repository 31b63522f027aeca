"""Qwen3-Next and Qwen3.5 checkpoints in Hugging Face layout: a folder of config.json and shards.

params, config = load(folder)                          bfloat16 or float32, as it is stored
params, config = load(folder, shardings=on_my_mesh)    placed while it is read

Onto a mesh that shares heads: commit_schemes/decoding/placement.py.
"""

from gdn.huggingface.config import Source, read_config
from gdn.huggingface.drafter import load_drafter, read_drafter_config
from gdn.huggingface.load import load
