//! The cache as a layer of an export.

use super::{Cache, Config};
use crate::backend::Backend;
use crate::layer::kind::{LayerConfig, LayerError, LayerKind, LayerSyntaxError, Opening, Role};
use std::io;
use std::sync::Arc;
use thruway_engine::Reactors;
use thruway_engine::units::{Invalid, parse_size};

pub(crate) const KIND: LayerKind = LayerKind {
    name: "cache",
    syntax: "cache=SIZE[:writeback[:volatile]][:BLOCK]",
    about: "A cache in blocks of 64 KiB, spread over the memory nodes; writes go through to the disk, or with `writeback` stay until a \
            flush, five seconds, or an eighth of the cache.",
    parse: |value| Ok(Arc::new(parse(value)?)),
};

/// A cache that cannot be made.
#[derive(Debug, thiserror::Error)]
enum CacheError {
    #[error("cache: {0}")]
    Other(io::Error),
    /// There is no room for a cache that outlives the daemon.
    #[error("cache: {0} in /dev/shm; make it smaller, or :volatile, to be lost if the daemon is killed")]
    NoRoom(io::Error),
}

fn parse(text: &str) -> Result<Config, LayerSyntaxError> {
    let mut words = text.split(':');
    let mut config = Config::new(parse_size(words.next().unwrap_or(""))?);
    for word in words {
        match word {
            "writeback" => config.write_back = true,
            "volatile" => config.volatile = true,
            size => {
                let block = u32::try_from(parse_size(size)?);
                config.block = block.map_err(|_| Invalid::new("block size of a cache", size, "at most 1M"))?;
            }
        }
    }
    if config.volatile && !config.write_back {
        return Err(LayerSyntaxError::Without(":volatile", ":writeback"));
    }
    Ok(config)
}

impl LayerConfig for Config {
    fn put_on(&self, below: Arc<dyn Backend>, opening: &mut Opening<'_>) -> Result<Arc<dyn Backend>, LayerError> {
        let nodes = opening.reactors.map_or(vec![0], Reactors::nodes);
        let file = if self.role().is_lasting { opening.cache_file.take() } else { None };
        let no_room = |e: io::Error| match e.raw_os_error() {
            Some(libc::ENOSPC | libc::ENOMEM) => LayerError::new(CacheError::NoRoom(e)),
            _ => LayerError::new(CacheError::Other(e)),
        };
        let reactors = opening.reactors.map(Reactors::load_balancer);
        Ok(Arc::new(Cache::in_file(below, self.clone(), &nodes, reactors, file).map_err(no_room)?))
    }

    fn check(&self, nodes: usize) -> Result<(), LayerError> {
        Config::check(self, nodes).map_err(|e| LayerError::new(CacheError::Other(e)))
    }

    fn role(&self) -> Role {
        let is_lasting = self.write_back && !self.volatile;
        Role { caches: true, writes_back: self.write_back, is_lasting, ..Role::default() }
    }
}
