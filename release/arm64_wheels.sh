#!/bin/sh
# Cross-compiles wheels for 64-bit ARM into dist/ on Debian for x86-64, and loads each one under qemu.
#
#     release/arm64_wheels.sh              # for the Python of Debian 12 (3.11) and of Debian 13 (3.13, which fits 3.12 and later)
#     release/arm64_wheels.sh bookworm     # only the first
#
# build/arm64/SUITE/root gets that Debian's Python and libraries for arm64, which are only unpacked, and build/arm64/SUITE/python
# starts this Python. The compiler and the glibc that it links with are those of this machine.
# Needs root, and: apt install g++-aarch64-linux-gnu mmdebstrap qemu-user-static

set -e
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- bookworm trixie

for suite in "$@"; do
  at="$PWD/build/arm64/$suite"
  mkdir -p "$at"
  if [ ! -e "$at/.complete" ]; then
    rm -rf "$at/root" "$at/builder"
    mmdebstrap --quiet --variant=extract --architectures=arm64 --skip=check/qemu \
      --include=libgomp1,libpython3-dev,libstdc++6,python3 "$suite" "$at/root"
    [ -e "$at/root/lib" ] || ln -s usr/lib "$at/root/lib"
    .venv/bin/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --target "$at/builder" \
      nanobind scikit-build-core
    cat >"$at/python" <<SCRIPT
#!/bin/sh
exec qemu-aarch64-static -L "$at/root" -0 "$at/python" "$at/root/usr/bin/python3" "\$@"
SCRIPT
    chmod +x "$at/python"
    touch "$at/.complete"
  fi

  # The emulated Python names the platform. It starts the CMake of this machine, which starts the cross-compiler.
  rm -rf "$at/wheel"
  python=$(basename "$(readlink "$at/root/usr/bin/python3")")
  PATH="$PWD/.venv/bin:$PATH" PYTHONPATH="$at/builder" PYTHONSAFEPATH=1 CMAKE_ARGS="-DCMAKE_SYSTEM_NAME=Linux
    -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DPython_INCLUDE_DIR=$at/root/usr/include/$python
    -DCMAKE_CXX_FLAGS=-idirafter\ $at/root/usr/include" \
    "$at/python" -c "import scikit_build_core.build as backend; print(backend.build_wheel('$at/wheel'))"
  PATH="$PWD/.venv/bin:$PATH" .venv/bin/auditwheel repair --wheel-dir dist "$at"/wheel/*.whl

  # The processors have NEON and SDOT; and all that qemu knows.
  rm -rf "$at/loaded"
  .venv/bin/python -m zipfile -e "$at"/wheel/*.whl "$at/loaded"
  for cpu in neoverse-n1 max; do
    QEMU_CPU=$cpu PYTHONPATH="$at/loaded" PYTHONSAFEPATH=1 "$at/python" \
      -c 'import sys, moeserve._cpu as kernels; print(f"Python {sys.version.split()[0]}:", *kernels.usable_isas())'
  done
done
