readonly __box_dir=$1
set --
if [ -e "$__box_dir/state" ]; then . "$__box_dir/state"; fi
__box_run= __box_how= __box_code= __box_text= __box_opts= __box_busy= __box_int=
if [ -n "${BASH_VERSION-}" ]; then
# An interrupt leaves all loops. It cannot leave a function, so there it kills the shell.
trap '[ -z "$__box_busy" ] || if [ -z "${FUNCNAME-}" ]; then __box_int=i; break 9999; else kill -KILL $$; fi' INT
__box_go='IFS=" " read -r -d "" __box_run __box_how __box_text'
__box_get='IFS= read -r -d "" __box_text <"$__box_dir/text"'
__box_do='LINENO=0 __box_busy=1; command eval " $__box_text"'
else
__box_go='IFS=" " read -r __box_run __box_how __box_text'
__box_get='__box_text='\''command . "$__box_dir/text"'\'
__box_do='command eval " $__box_text"'
fi
# The agent gets the end before the exports and does not wait for them. An interrupted text has failed: the status of its
# last builtin, 0 or 1, does not count, and another one, of a program that was killed as well, does.
__box_end='{ __box_code=$? __box_busy= __box_opts=$-; set +euvx
case $__box_int$__box_code in i[01]) __box_code=130;; esac; __box_int=
case $__box_how in s*) . "$__box_dir/after" >/dev/null;; esac
printf "%s\0" "$__box_run" "$__box_code" "$PWD" "" ""; } >|"$__box_dir/done" 2>/dev/null
exec </dev/null >/dev/null 2>&1
{ printf "%s\0" "$__box_run" exports "" ""; export -p; printf "\0"; } >|"$__box_dir/done"'
# The end is repeated after the loop, because a text can leave the loop.
__box_loop='while :; do
until '"$__box_go"' <"$__box_dir/go"; do [ -p "$__box_dir/go" ] || exit 1; done
exec >|"$__box_dir/out" 2>|"$__box_dir/err"
case $__box_how in ?o?)
exec <"$__box_dir/in"
printf "%s\0" "$__box_run" begun "" "" "" >|"$__box_dir/done";; esac
case $__box_how in *f) '"$__box_get"';; esac
__box_code=0
case $__box_how in s*) . "$__box_dir/before";; esac
if [ "$__box_code" = 0 ]; then
case $__box_opts in *[euvx]*)
case $__box_opts in *e*) set -e;; esac
case $__box_opts in *u*) set -u;; esac
case $__box_opts in *v*) set -v;; esac
case $__box_opts in *x*) set -x;; esac;; esac
'"$__box_do"'
else
(exit "$__box_code")
fi
'"$__box_end"'
done
'"$__box_end"'
eval "$__box_loop"'
exec </dev/null >/dev/null 2>&1
eval "$__box_loop"
