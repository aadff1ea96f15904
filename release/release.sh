#!/usr/bin/env bash
# Checks, builds and tags the version of moeserve/__init__.py, and prints what a person then uploads. It sends nothing.
# Wheels for further versions of Python: DIST_PYTHONS="python3.10 python3.12" release/release.sh
set -euo pipefail
cd "$(dirname "$0")/.."

refuse() {
    echo "No release: $1" >&2
    exit 1
}

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' moeserve/__init__.py)
[[ -z $(git status --porcelain) ]] || refuse "the tree has changes that are not committed. See: git status"
git rev-parse --quiet --verify "refs/tags/v$version" >/dev/null &&
    refuse "v$version is tagged already. Raise __version__ in moeserve/__init__.py."
grep --quiet --extended-regexp "^## ${version//./\\.} \([0-9]{4}-[0-9]{2}-[0-9]{2}\)$" CHANGELOG.md ||
    refuse "CHANGELOG.md has no heading '## $version ($(date +%F))'. Write one, with what is new below."

make check dist
git tag --annotate --message "moeserve $version" "v$version"

cat <<END

v$version is tagged in this clone, and dist/ is checked. release/clean_machine.sh tries its wheels on a bare Debian.
To publish it, after .ci/run has passed:

    git push origin v$version
    build/dist-tools/bin/twine upload dist/*

To take it back before that: git tag --delete v$version
Checksums:
$(cd dist && sha256sum -- *)
END
