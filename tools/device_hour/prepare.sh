#!/usr/bin/env bash
# Builds what an hour on a card needs, on a machine with Rust: stripped binaries in target/device_hour, at most 64 MiB in all, so that
# the machine with the card needs neither Rust nor a network. Copy the repository with that folder there, and run the three scripts.
#
#   tools/device_hour/prepare.sh [--debug]    --debug: of the debug build, for a try on the emulator
set -euo pipefail
cd "$(dirname "$0")/../.."
out=target/device_hour
mkdir -p "$out"
if [ "${1:-}" = --debug ]; then
  release=()
elif [ $# = 0 ]; then
  release=(--release)
else
  echo "unknown argument $1: $(sed -n '2,5p' "$0")" >&2
  exit 2
fi
# The path that cargo names for a test program, or for the program itself.
built() {
  sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1
}
cargo build --workspace --bin phalanx "${release[@]}" --message-format json-render-diagnostics | built >"$out/paths"
cargo test --workspace --no-run --test operations "${release[@]}" --message-format json-render-diagnostics | built >>"$out/paths"
cargo test --workspace --no-run --test train "${release[@]}" --message-format json-render-diagnostics | built >>"$out/paths"
for name in phalanx operations train; do
  IFS= read -r path
  strip -o "$out/$name" "$path"
done <"$out/paths"
rm "$out/paths"
bytes=$(cat "$out"/phalanx "$out"/operations "$out"/train | wc -c)
echo "$out: $((bytes >> 20)) MiB"
if [ "$bytes" -gt $((64 << 20)) ]; then
  echo "more than 64 MiB: too much to carry" >&2
  [ ${#release[@]} = 0 ] || exit 1
fi
