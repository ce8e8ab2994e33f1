//! Steps of the whole suite. All of them run, also after a failure, and a table at the end has their times.

use std::time::{Duration, Instant};

/// Runs steps one after the other.
#[derive(Default)]
pub(crate) struct Steps(Vec<Step>);

struct Step {
    name: &'static str,
    time: Duration,
    failure: Option<String>,
}

impl Steps {
    /// Runs a step.
    pub(crate) fn run(&mut self, name: &'static str, step: impl FnOnce() -> Result<(), String>) {
        let start = Instant::now();
        let failure = step().err();
        if let Some(why) = &failure {
            eprintln!("    FAILED: {why}");
        }
        self.0.push(Step { name, time: start.elapsed(), failure });
    }

    /// Prints the table.
    ///
    /// # Errors
    /// The names of the steps that failed.
    pub(crate) fn finish(self) -> Result<(), String> {
        let total: Duration = self.0.iter().map(|step| step.time).sum();
        eprintln!("\n{:<16} {:>8}", "step", "seconds");
        for Step { name, time, failure } in &self.0 {
            let word = if failure.is_some() { "FAILED" } else { "" };
            eprintln!("{:<16} {:>8.0}  {word}", name, time.as_secs_f64());
        }
        eprintln!("{:<16} {:>8.0}", "all", total.as_secs_f64());
        let failed: Vec<&str> = self.0.iter().filter(|step| step.failure.is_some()).map(|step| step.name).collect();
        if failed.is_empty() { Ok(()) } else { Err(format!("failed: {}", failed.join(", "))) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_run_after_a_failure_which_is_named() {
        let (mut steps, mut ran) = (Steps::default(), 0);
        for (name, result) in [("a", Ok(())), ("b", Err("no".to_string())), ("c", Ok(())), ("d", Err("no".to_string()))]
        {
            steps.run(name, || {
                ran += 1;
                result
            });
        }
        assert_eq!((steps.finish(), ran), (Err("failed: b, d".into()), 4));
    }
}
