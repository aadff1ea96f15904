#!/usr/bin/env bash
# Builds the image of the Containerfile with podman, and serves MODEL from it: without privileges, with a read-only root.
#
#     release/try_image.sh ~/.cache/moeserve/smollm2-135m-instruct-mixtral-4x-v1    # needs root, podman, curl and `make wheel`
#     BASE_SUITE=bookworm release/try_image.sh ...    # where no registry can be reached: on an image made by mmdebstrap
#     BUILD_OPTIONS="--volume /srv/wheels:/srv/wheels:ro" ...    # more for podman build, such as what pip's settings name
set -euo pipefail
cd "$(dirname "$0")/.."
model=$(realpath "$1")
port=${PORT:-18080}
read -ra options <<<"${BUILD_OPTIONS:-}"

if [[ -n ${BASE_SUITE:-} ]]; then
    mmdebstrap --quiet --variant=minbase --include=ca-certificates,python3-venv,python-is-python3 "$BASE_SUITE" - |
        podman import --quiet - localhost/python-of-debian
    options+=(--build-arg BASE=localhost/python-of-debian)
fi
podman build --quiet --format docker --tag moeserve-try "${options[@]}" --file examples/deployment/Containerfile .
podman image ls moeserve-try

container=$(podman run --detach --read-only --cap-drop all --security-opt no-new-privileges --publish "127.0.0.1:$port:8000" \
    --volume "$model:/models/model:ro" --volume moeserve-try:/cache moeserve-try /models/model)
trap 'podman rm --force --volumes "$container" >/dev/null; podman volume rm moeserve-try >/dev/null' EXIT
curl --silent --fail --retry 120 --retry-delay 1 --retry-all-errors --output /dev/null "http://127.0.0.1:$port/ready" ||
    { podman logs "$container"; exit 1; }
podman exec "$container" id
if podman exec "$container" touch /written 2>/dev/null; then echo "the root is not read-only" >&2; exit 1; fi
podman healthcheck run "$container" && echo "healthy"

ask() {
    curl --silent --fail --no-buffer "http://127.0.0.1:$port/v1/chat/completions" -H "Content-Type: application/json" \
        -d "{\"messages\": [{\"role\": \"user\", \"content\": \"What is the capital of England?\"}], \"temperature\": 0, $1}"
}
ask '"max_tokens": 32' | grep London

# SIGTERM while an answer is streamed: it is sent to its end, and the server exits with status 0.
exec 3< <(ask '"stream": true, "ignore_eos": true, "max_tokens": 64')
read -r first <&3
podman stop --time 60 "$container" >/dev/null &
events=$(cat <&3)
wait
grep --quiet --fixed-strings '[DONE]' <<<"$events" || { echo "the stream broke off: $first" >&2; exit 1; }
echo "$(grep --count '^data:' <<<"$events") events were sent after SIGTERM; exit status $(podman inspect --format '{{.State.ExitCode}}' "$container")"
