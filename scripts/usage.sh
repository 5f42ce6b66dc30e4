# Sourced by the scripts here before anything else: with --help or -h, prints the comment at the head of the script and ends it.
case "${1:-}" in
    -h | --help)
        sed -n '2,$ { /^#/!q; s/^# \{0,1\}//p }' "$0"
        exit 0
        ;;
esac
# Refuses all options of a script that takes none.
no_options() { [ $# = 0 ] || { echo "error: $1 is not known here; there is only --help" >&2; exit 2; }; }
