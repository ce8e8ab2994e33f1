//! Host of the current task: the one that it works for. Shared queues use it to let hosts take turns.

use crate::slices::Timed;
use std::future::Future;
use thruway_tcp::Origin;

tokio::task_local! {
    static CALLER: Option<Origin>;
}

/// Runs work for a host: [`current`] returns that host within `work`, whose time counts for the host ([`crate::slices`]).
pub fn on_behalf_of<T>(caller: Origin, work: impl Future<Output = T>) -> impl Future<Output = T> {
    CALLER.scope(Some(caller), Timed(work))
}

/// Runs work of another task for the host of this one: [`current`] returns the same within `work`.
pub fn inherited<T>(work: impl Future<Output = T>) -> impl Future<Output = T> {
    CALLER.scope(current(), Timed(work))
}

/// Returns the host of the current task; `None` outside [`on_behalf_of`], for work of the daemon itself.
pub fn current() -> Option<Origin> {
    CALLER.try_with(|caller| *caller).ok().flatten()
}
