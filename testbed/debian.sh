# Sourced by what builds guests' kernels: a view of another suite of Debian's, beside the machine's own sources.

# view SUITE DIRECTORY [deb-src]: fetches the suite's lists, and sets `apt` to the options that make apt-get use them.
view() {
    local suite=$1 dir=$2 kind=${3:-deb} mirror
    mkdir -p "$dir"/{lists,archives}/partial
    mirror=$(sed -n 's/^URIs: *//p' /etc/apt/sources.list.d/*.sources 2>/dev/null | grep -v security | head -n 1 || true)
    [[ -n $mirror ]] || mirror=$(awk '$1 == "deb" { for (i = 2; i <= NF; i++) if ($i ~ /^http/) { print $i; exit } }' /etc/apt/sources.list)
    echo "$kind [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" >"$dir/sources.list"
    apt=(-o "Dir::Etc::sourcelist=$dir/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$dir/lists"
        -o "Dir::Cache=$dir" -o "Dir::Cache::archives=$dir/archives" -o APT::Sandbox::User=root -o Acquire::Languages=none)
    apt-get "${apt[@]}" update -qq
}

# dependency PACKAGE PATTERN: the first package that PACKAGE depends on and whose name matches.
dependency() { apt-cache "${apt[@]}" depends "$1" | sed -n "s/.*Depends: \\($2\\)\$/\\1/p" | head -n 1; }
