//! Copies in the background: progress to watch, and a way to end them.

use crate::client::{self, Finished, Job, Stop};
use crate::session::{OnReport, PipelineSet, Progress, SessionError};
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

/// Runs jobs of this process; they share threads and storage.
pub struct Client {
    pipelines: Arc<PipelineSet>,
}

impl Client {
    /// Starts the threads.
    ///
    /// # Errors
    /// If memory or threads are not to be had.
    pub fn new() -> io::Result<Client> {
        Ok(Client { pipelines: PipelineSet::new()? })
    }

    /// Starts a job on a thread of its own. Entries that cannot be copied are counted in [`Finished::summary`] and logged.
    ///
    /// # Errors
    /// If there is no thread for it.
    pub fn start(&self, job: Job) -> io::Result<Transfer> {
        let logged = |report: &crate::wire::Report| {
            tracing::warn!(path = %crate::escape(&report.path), "{}", crate::escape_message(&report.message));
        };
        self.start_with(job, Arc::new(logged))
    }

    /// As [`Client::start`], with a function that hears of every entry that cannot be copied.
    ///
    /// # Errors
    /// As [`Client::start`].
    pub fn start_with(&self, job: Job, on_report: OnReport) -> io::Result<Transfer> {
        let (progress, stop) = (Arc::new(Progress::default()), Stop::default());
        let thread = {
            let (pipeline, progress, stop) = (Arc::clone(self.pipelines.pick()), Arc::clone(&progress), stop.clone());
            std::thread::Builder::new()
                .name("transfer".into())
                .spawn(move || client::run_until(&job, &pipeline, &progress, &on_report, None, &stop))?
        };
        Ok(Transfer { progress, stop, thread })
    }
}

/// A job that is being done. Dropping this lets it go on.
pub struct Transfer {
    progress: Arc<Progress>,
    stop: Stop,
    thread: JoinHandle<Result<Finished, SessionError>>,
}

impl Transfer {
    /// What has been done so far.
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Ends it. What has been copied stays, and a job of the same id goes on from there.
    pub fn cancel(&self) {
        self.stop.stop();
    }

    /// Whether it has ended.
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits until it has ended.
    ///
    /// # Errors
    /// [`SessionError`].
    ///
    /// # Panics
    /// If the job has.
    pub fn wait(self) -> Result<Finished, SessionError> {
        self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}
