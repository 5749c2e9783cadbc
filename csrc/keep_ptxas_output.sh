#!/bin/sh
# Runs a compiler, and keeps its output in OBJECT.words: keep_ptxas_output.sh COMPILER … -o OBJECT …
#
# ptxas prints what it had to serialize (-Xptxas=-v). tests/csrc/test_resources.py reads it without a second
# compilation; with EMBERT_TEST_SERIALIZED, the compilation fails. All other output goes to the terminal.
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
[ -z "$EMBERT_TEST_SERIALIZED" ] || ! grep -q '(C75[0-9][0-9])' "$words" || status=1
exit "$status"
