#!/bin/bash
set -euo pipefail
apt-get update && apt-get install -y --no-install-recommends ffmpeg
uv pip install torchcodec
