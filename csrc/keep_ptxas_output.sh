#!/bin/sh
# Runs a compiler, and keeps what it says in OBJECT.words: keep_ptxas_output.sh COMPILER … -o OBJECT …
#
# ptxas says how many registers each kernel has (-Xptxas=-v). tests/csrc/test_resources.py reads that, so nothing is
# compiled for it once more. The screen gets the rest.
object=
before=
for word; do
  [ "$before" != -o ] || object=$word
  before=$word
done
words=${object:?"no -o among: $*"}.words
status=0
"$@" 2>"$words" || status=$?
grep -Ev '^ptxas info +: ([0-9]+ bytes gmem|Compiling|Function|Used|Compile time)|^ +[0-9]+ bytes stack' "$words" >&2
exit "$status"
