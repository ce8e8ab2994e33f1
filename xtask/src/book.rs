//! Checks of the documentation that is not in code: links, the book's table of contents, spelling.

use crate::{run, top};
use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Checks that every link between the project's pages leads somewhere, and that the book's table of contents has all pages.
pub(crate) fn links() -> Result<(), String> {
    let listed = Command::new("git").args(["ls-files", "*.md"]).current_dir(top()).output();
    let listed = listed.map_err(|e| format!("git ls-files: {e}"))?;
    let pages = String::from_utf8_lossy(&listed.stdout).into_owned();
    let tracked = Command::new("git").args(["ls-files"]).current_dir(top()).output();
    let tracked = String::from_utf8_lossy(&tracked.map_err(|e| format!("git ls-files: {e}"))?.stdout).into_owned();
    let mut wrong = Vec::new();
    for page in pages.lines() {
        let text = fs::read_to_string(top().join(page)).map_err(|e| format!("{page}: {e}"))?;
        let directory = Path::new(page).parent().unwrap_or(Path::new(""));
        for target in targets(&text) {
            if let Err(why) = follow(page, directory, &target) {
                wrong.push(format!("{page}: {target}: {why}"));
            }
        }
        for name in sources(&text) {
            let end = format!("/{name}");
            if !tracked.lines().any(|file| file == name || file.ends_with(&end)) {
                wrong.push(format!("{page}: `{name}`: there is no such file"));
            }
        }
    }
    let summary = fs::read_to_string(top().join("docs/src/SUMMARY.md")).map_err(|e| format!("SUMMARY.md: {e}"))?;
    let chapters = targets(&summary);
    for page in pages.lines().filter_map(|page| page.strip_prefix("docs/src/")).filter(|page| *page != "SUMMARY.md") {
        if !chapters.iter().any(|chapter| chapter == page) {
            wrong.push(format!("docs/src/SUMMARY.md: {page} is missing"));
        }
    }
    eprintln!("==> links: {} pages", pages.lines().count());
    if wrong.is_empty() { Ok(()) } else { Err(format!("links:\n{}", wrong.join("\n"))) }
}

/// Where the links of a page lead, code left out.
fn targets(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut in_code = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        }
        let plain: String = line.split('`').step_by(2).collect();
        let mut rest = if in_code { "" } else { &plain };
        while let Some((_, behind)) = rest.split_once("](") {
            let (target, after) = behind.split_once(')').unwrap_or((behind, ""));
            found.push(target.to_string());
            rest = after;
        }
    }
    found
}

/// Source files that a page names.
fn sources(text: &str) -> impl Iterator<Item = &str> {
    let is_source = |name: &&str| name.ends_with(".rs") && !name.contains([' ', '*', '{']) && name.contains('/');
    text.split('`').skip(1).step_by(2).filter(is_source)
}

fn follow(page: &str, directory: &Path, target: &str) -> Result<(), String> {
    if target.contains("://") {
        return Ok(());
    }
    let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
    let path = if file.is_empty() { top().join(page) } else { top().join(directory).join(file) };
    if !path.exists() {
        return Err("there is no such file".into());
    }
    if anchor.is_empty() {
        return Ok(());
    }
    let text = fs::read_to_string(&path).map_err(|e| e.to_string())?;
    if anchors(&text).contains(anchor) { Ok(()) } else { Err("there is no such heading".into()) }
}

/// The anchors of a page's headings, as mdBook and forges make them.
fn anchors(text: &str) -> HashSet<String> {
    let heading = |line: &str| Some(line.trim_start_matches('#').strip_prefix(' ')?.to_string());
    let of = |title: String| {
        let kept = title.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.collect::<String>().trim().to_lowercase().replace(' ', "-")
    };
    text.lines().filter(|line| line.starts_with('#')).filter_map(heading).map(of).collect()
}

/// Checks the spelling of code and pages (typos.toml has the words that are right).
pub(crate) fn spelling() -> Result<(), String> {
    let typos = top().join("target/tools/typos/bin/typos");
    if !typos.exists() {
        let to = top().join("target/tools/typos");
        let to = to.to_str().ok_or("the checkout's path is not UTF-8")?;
        run("spelling checker", "python3", &["-m", "pip", "install", "--quiet", "--target", to, "typos==1.52.0"])?;
    }
    run("spelling", typos.to_str().ok_or("the checkout's path is not UTF-8")?, &["--format", "brief"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_found_outside_code() {
        let text = "see [a](x.md#b) and [c](y.md)\n```\n[d](z.md)\n```\n`[e](w.md)` [f](#g)";
        assert_eq!(targets(text), ["x.md#b", "y.md", "#g"]);
        assert!(anchors("# The `cp` command, briefly\n## RDMA").contains("the-cp-command-briefly"));
    }
}
