#!/usr/bin/env bash
# Installs vLLM's CPU build into a virtual environment: install.sh FOLDER. It takes about two minutes and 4 GB.
#
# It is an environment of its own because vLLM pins transformers below the version of constraints.txt. vLLM requires
# torchvision for most image processors, and the package index has no build of it for a CPU-only torch. The CUDA build
# works after two of its modules, which register CUDA operators, are replaced by empty ones.
set -euo pipefail
folder=$1
python="$folder/bin/python"
pip="$python -m pip --disable-pip-version-check install --quiet"

test -x "$python" || "${PYTHON:-python3}" -m venv "$folder"
$pip torch==2.13.0
$pip -r "$(dirname "${BASH_SOURCE[0]}")/requirements.txt"
"$python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
$pip --no-deps torchvision==0.28.0
cat > "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/sitecustomize.py" <<'PYTHON'
import sys
import types

for name in ("_meta_registrations", "_autograd_registrations"):
    sys.modules.setdefault(f"torchvision.{name}", types.ModuleType(f"torchvision.{name}"))
PYTHON
"$python" -c 'import vllm, torchvision'
touch "$folder/.installed"
