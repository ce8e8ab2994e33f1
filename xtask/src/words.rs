//! Plain English in comments and pages: counts unusual phrases, and keeps the count from rising.

use crate::top;
use regex::Regex;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::process::Command;

/// Recorded index of each group of files, and the revision from which on the subjects of commits are checked.
const RECORD: &str = ".config/words.txt";
const SUBJECT_MAX: usize = 72;

/// Kinds of phrases that technical prose rarely uses, and patterns for them.
const PHRASES: [(&str, &str); 10] = [
    (
        "a clause for a noun",
        r"\bwhat (is|are|was|were|has|have|had|it|they|the|a|an|can|must|may|will|comes?|goes|of|to|there|else|others?)\b",
    ),
    ("a person for code", r"\b(who|whom|whose|whoever|nobody|none has)\b"),
    ("code that speaks or hears", r"\b(says?|said|saying|tells?|is told|are told|was told|hears?|heard)\b"),
    ("looks again, now and then", r"\blook(s|ed|ing)? (again|now|more|once|whether|for)\b|\bnow and then\b"),
    ("so many, so much", r"\bso (many|much|long|few)\b"),
    ("is gone, has come", r"\b(has|have|is|are|had|was) (gone|come)\b|\bcomes? to (have|be)\b"),
    ("given back, lent", r"\b(given|gives|give|giving|had|have|gave|has) (\w+ )?back\b|\b(lent|lends?)\b"),
    ("meanwhile, at a time", r"\bmeanwhile\b|\bat (a|one) time\b|\b(or|would|could|must) else\b"),
    ("by which, of which", r"\b(by|of|in|for|to|from|behind|through|on|with) which\b"),
    ("is no X", r"\b(is|are|was) no (\w+)"),
];
/// Words that may follow "is no".
const AFTER_NO: [&str; 3] = ["longer", "more", "such"];

/// Compiled patterns.
struct Patterns {
    phrases: Vec<(&'static str, Regex)>,
    first_words: Regex,
    code: Regex,
}

impl Patterns {
    fn new() -> Patterns {
        let compile = |pattern: &str| Regex::new(pattern).expect("the patterns are constant");
        let phrases = PHRASES.iter().map(|(kind, pattern)| (*kind, compile(&format!("(?i){pattern}")))).collect();
        Patterns {
            phrases,
            first_words: compile(r"^(What|How|Whether|Where|Whose|Who|When|Whom|Which)\b"),
            code: compile(r"`[^`]*`|\(https?:[^)]*\)"),
        }
    }

    /// Kinds of the unusual phrases in a line.
    fn hits(&self, line: &Line) -> Vec<&'static str> {
        let mut found = Vec::new();
        for (kind, pattern) in &self.phrases {
            let is_hit = |captures: &regex::Captures<'_>| {
                let word = captures.get(2).map_or("", |word| word.as_str()).to_lowercase();
                *kind != "is no X" || !AFTER_NO.iter().any(|allowed| word.starts_with(allowed))
            };
            found.extend(pattern.captures_iter(&line.text).filter(is_hit).map(|_| *kind));
        }
        if line.begins_doc && self.first_words.is_match(&line.text) {
            found.push("a doc comment that begins with What, How, Who");
        }
        found
    }
}

/// A line of prose.
#[derive(Debug, PartialEq, Eq)]
struct Line {
    number: usize,
    text: String,
    /// It is the first line of a doc comment.
    begins_doc: bool,
}

/// Comments of Rust code.
fn comments(source: &str) -> Vec<Line> {
    let mut lines = Vec::new();
    let mut previous = "";
    for (at, line) in source.lines().enumerate() {
        let stripped = line.trim();
        if let Some(text) = stripped.strip_prefix("//") {
            let text = text.strip_prefix(['/', '!']).unwrap_or(text);
            let begins_doc = stripped.starts_with("///") && !previous.starts_with("///");
            lines.push(Line { number: at + 1, text: text.trim_start().into(), begins_doc });
        }
        previous = stripped;
    }
    lines
}

/// Text of a page, without code.
fn prose(page: &str, code: &Regex) -> Vec<Line> {
    let mut in_code = false;
    let mut lines = Vec::new();
    for (at, line) in page.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        } else if !in_code {
            lines.push(Line { number: at + 1, text: code.replace_all(line, "").into_owned(), begins_doc: false });
        }
    }
    lines
}

/// The group of a file: its crate, its directory, or the pages.
fn group_of(path: &str) -> &str {
    let is_page = path.ends_with(".md");
    let mut slashes = path.match_indices('/').map(|(at, _)| at);
    let (first, second) = (slashes.next(), slashes.next());
    match (first, second) {
        _ if is_page => "pages",
        (Some(_), Some(second)) if path.starts_with("crates/") => &path[..second],
        (Some(first), _) => &path[..first],
        _ => path,
    }
}

/// Words and unusual phrases of a group.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Count {
    words: usize,
    hits: usize,
}

impl Count {
    /// Unusual phrases per 10,000 words.
    fn index(&self) -> usize {
        (10_000 * self.hits + self.words / 2) / self.words.max(1)
    }
}

#[derive(Default)]
struct Measured {
    groups: BTreeMap<String, Count>,
    /// Lines with most hits first.
    worst: Vec<(usize, String)>,
}

fn measure() -> Result<Measured, String> {
    let patterns = Patterns::new();
    let mut measured = Measured::default();
    for path in git(&["ls-files", "*.rs", "*.md"])?.lines() {
        // A file that is removed and not yet committed is listed.
        let Ok(text) = fs::read_to_string(top().join(path)) else { continue };
        let lines = if path.ends_with(".md") { prose(&text, &patterns.code) } else { comments(&text) };
        let count = measured.groups.entry(group_of(path).into()).or_default();
        for line in lines {
            let hits = patterns.hits(&line).len();
            count.words += line.text.split_whitespace().count();
            count.hits += hits;
            if hits > 0 {
                measured.worst.push((hits, format!("{path}:{}: {}", line.number, line.text)));
            }
        }
    }
    measured.worst.sort_by_key(|(hits, _)| std::cmp::Reverse(*hits));
    Ok(measured)
}

fn git(args: &[&str]) -> Result<String, String> {
    let result = Command::new("git").args(args).current_dir(top()).output().map_err(|e| format!("git: {e}"))?;
    if !result.status.success() {
        return Err(format!("git {}: {}", args.join(" "), String::from_utf8_lossy(&result.stderr).trim()));
    }
    Ok(String::from_utf8_lossy(&result.stdout).into_owned())
}

/// Contents of the record.
#[derive(Debug, PartialEq, Eq)]
struct Record {
    /// Subjects of later commits are checked.
    since: String,
    indexes: BTreeMap<String, usize>,
}

impl Record {
    fn parse(text: &str) -> Result<Record, String> {
        let mut record = Record { since: String::new(), indexes: BTreeMap::new() };
        for line in text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty()) {
            let invalid =
                || format!("{RECORD}: invalid line '{line}' (expected \"since REVISION\" or \"GROUP INDEX\")");
            let (name, value) = line.split_once(' ').ok_or_else(invalid)?;
            if name == "since" {
                record.since = value.trim().into();
            } else {
                record.indexes.insert(name.into(), value.trim().parse().map_err(|_| invalid())?);
            }
        }
        Ok(record)
    }

    fn text(&self) -> String {
        let mut text = String::from(
            "# Unusual phrases per 10,000 words of comments in each crate, and of the pages. `cargo xtask check` fails when one rises;\n\
             # `cargo xtask words record` writes lower values. Subjects of the commits after `since` are checked, too.\n",
        );
        let _ = writeln!(text, "since {}", self.since);
        for (group, index) in &self.indexes {
            let _ = writeln!(text, "{group} {index}");
        }
        text
    }

    fn read() -> Result<Record, String> {
        let text = fs::read_to_string(top().join(RECORD)).map_err(|e| format!("{RECORD}: {e}"))?;
        Record::parse(&text)
    }

    /// Groups whose index is higher than recorded. A new group may have `NEW_MAX`.
    fn risen(&self, measured: &BTreeMap<String, Count>) -> Vec<String> {
        let mut risen = Vec::new();
        for (group, count) in measured {
            let limit = self.indexes.get(group).copied().unwrap_or(NEW_MAX);
            if count.index() > limit {
                risen.push(format!("{group}: {} (recorded: {limit})", count.index()));
            }
        }
        risen
    }
}

/// Largest index of a group that is not recorded.
const NEW_MAX: usize = 60;

/// Prints the index of each group and the lines with most unusual phrases.
pub(crate) fn show() -> Result<(), String> {
    let measured = measure()?;
    let mut groups: Vec<(&String, &Count)> = measured.groups.iter().collect();
    groups.sort_by_key(|(_, count)| std::cmp::Reverse(count.index()));
    let mut text = String::new();
    for (group, count) in groups {
        let _ = writeln!(text, "{:6}  {group}  ({} words)", count.index(), count.words);
    }
    for (hits, line) in measured.worst.iter().take(20) {
        let _ = writeln!(text, "{hits:6}  {line}");
    }
    // The reader may have seen enough.
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(())
}

/// Records the values that have fallen.
pub(crate) fn record() -> Result<(), String> {
    let measured = measure()?;
    let mut record = Record::read()?;
    for (group, count) in &measured.groups {
        let known = record.indexes.entry(group.clone()).or_insert(NEW_MAX);
        *known = count.index().min(*known);
    }
    record.indexes.retain(|group, _| measured.groups.contains_key(group));
    fs::write(top().join(RECORD), record.text()).map_err(|e| format!("{RECORD}: {e}"))?;
    check()
}

/// Fails if an index has risen, or if the subject of a commit is against the rules.
pub(crate) fn check() -> Result<(), String> {
    let (measured, record) = (measure()?, Record::read()?);
    let mut wrong = record.risen(&measured.groups);
    if !wrong.is_empty() {
        wrong.push("reword the lines that `cargo xtask words` prints".into());
    }
    wrong.extend(wrong_subjects(&record.since)?);
    if wrong.is_empty() { Ok(()) } else { Err(format!("words:\n{}", wrong.join("\n"))) }
}

fn wrong_subjects(since: &str) -> Result<Vec<String>, String> {
    if let Err(why) = git(&["rev-parse", "--verify", "--quiet", &format!("{since}^{{commit}}")]) {
        eprintln!(
            "    messages of commits NOT checked: the history does not have {since} (git fetch --unshallow): {why}"
        );
        return Ok(Vec::new());
    }
    let log = git(&["log", "--no-merges", "--format=%h%x00%s%x00%b%x01", &format!("{since}..")])?;
    let mut wrong = Vec::new();
    for entry in log.split('\u{1}').map(str::trim).filter(|entry| !entry.is_empty()) {
        let mut fields = entry.split('\0');
        let (hash, subject, body) = (fields.next(), fields.next(), fields.next());
        let (hash, subject, body) = (hash.unwrap_or(""), subject.unwrap_or(""), body.unwrap_or(""));
        wrong.extend(fault_of(subject, body).map(|fault| format!("{hash} {subject}: {fault}")));
    }
    Ok(wrong)
}

/// The rule that a commit's message breaks.
fn fault_of(subject: &str, body: &str) -> Option<&'static str> {
    let Some((scope, change)) = subject.split_once(": ") else {
        return Some("the subject has no area before a colon");
    };
    let is_past =
        |word: &str| word.ends_with("ed") && !["embed", "feed", "need", "shed", "speed", "seed"].contains(&word);
    let first = change.split_whitespace().next().unwrap_or("");
    match () {
        () if subject.chars().count() > SUBJECT_MAX => Some("the subject has more than 72 characters"),
        () if scope.split(", ").any(|area| area.is_empty() || area.contains(' ')) => {
            Some("the area before the colon is not a list of names")
        }
        () if change.contains(';') => Some("the subject names more than one change"),
        () if change.ends_with('.') => Some("the subject ends with a period"),
        () if first.ends_with("ing") || is_past(first) => Some("the subject is not imperative"),
        () if change.contains("once more") || change.contains("found") => {
            Some("the subject tells how the change was found")
        }
        () if body.trim().is_empty() => Some("the message has no body that gives the reason"),
        () => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phrases_are_counted_in_comments_only() {
        let patterns = Patterns::new();
        let source = "/// What is open.\n/// A limit.\nfn who() {} // not at the beginning\n    //! It is no longer told what to do, and is no host.\n";
        let lines = comments(source);
        assert_eq!(lines.iter().map(|line| line.number).collect::<Vec<_>>(), [1, 2, 4]);
        let hits: Vec<Vec<&str>> = lines.iter().map(|line| patterns.hits(line)).collect();
        let clause = "a clause for a noun";
        assert_eq!(hits[0], [clause, "a doc comment that begins with What, How, Who"]);
        assert_eq!(hits[1], Vec::<&str>::new());
        assert_eq!(hits[2], [clause, "is no X"]);
    }

    #[test]
    fn code_in_pages_is_not_counted() {
        let patterns = Patterns::new();
        let page = "Nobody `who says` that.\n```\nwho says\n```\n[x](https://who.example)\n";
        let lines = prose(page, &patterns.code);
        assert_eq!(lines.iter().map(|line| patterns.hits(line).len()).collect::<Vec<_>>(), [1, 0]);
    }

    #[test]
    fn files_belong_to_crates_directories_or_pages() {
        assert_eq!(group_of("crates/nfs/src/lib.rs"), "crates/nfs");
        assert_eq!(group_of("xtask/src/main.rs"), "xtask");
        assert_eq!(group_of("crates/nfs/README.md"), "pages");
    }

    #[test]
    fn a_risen_index_is_named() {
        let record = Record::parse("# comment\nsince abc\ncrates/a 50\ncrates/b 10\n").unwrap();
        assert_eq!(Record::parse(&record.text()).as_ref(), Ok(&record));
        let count = |hits| Count { words: 1000, hits };
        let measured = [("crates/a", 5), ("crates/b", 2), ("crates/new", 6), ("crates/other", 7)];
        let measured = measured.into_iter().map(|(group, hits)| (group.into(), count(hits))).collect();
        assert_eq!(record.risen(&measured), ["crates/b: 20 (recorded: 10)", "crates/other: 70 (recorded: 60)"]);
        assert!(Record::parse("crates/a").is_err() && Record::parse("crates/a many").is_err());
    }

    #[test]
    fn subjects_follow_the_rules() {
        assert_eq!(fault_of("nfs, server: refuse COPY onto an overlapping range", "Why."), None);
        let wrong = [
            ("refuse COPY", "Why."),
            ("nfs: refuse COPY; log it", "Why."),
            ("nfs: refuse COPY.", "Why."),
            ("nfs: refused COPY", "Why."),
            ("nfs: what a reader has found", "Why."),
            ("the server: refuse COPY", "Why."),
            ("nfs: refuse COPY", " \n"),
        ];
        for (subject, body) in wrong {
            assert!(fault_of(subject, body).is_some(), "{subject}");
        }
        assert!(fault_of(&format!("nfs: {}", "a".repeat(68)), "Why.").is_some());
    }
}
