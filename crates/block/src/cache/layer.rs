//! The cache as a layer of an export.

use super::{Cache, Config};
use crate::backend::Backend;
use crate::export::SpecError;
use crate::layer::{LayerConfig, LayerKind, Opening, Role};
use crate::open::OpenError;
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

fn parse(text: &str) -> Result<Config, SpecError> {
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
        return Err(SpecError::Without(":volatile", ":writeback"));
    }
    Ok(config)
}

impl LayerConfig for Config {
    fn put_on(&self, below: Arc<dyn Backend>, opening: &mut Opening<'_>) -> Result<Arc<dyn Backend>, OpenError> {
        let nodes = opening.reactors.map_or(vec![0], Reactors::nodes);
        let file = if self.role().is_lasting { opening.cache_file.take() } else { None };
        let no_room = |e: io::Error| match e.raw_os_error() {
            Some(libc::ENOSPC | libc::ENOMEM) => OpenError::CacheRoom(e),
            _ => OpenError::Cache(e),
        };
        let reactors = opening.reactors.map(Reactors::load_balancer);
        Ok(Arc::new(Cache::in_file(below, self.clone(), &nodes, reactors, file).map_err(no_room)?))
    }

    fn check(&self, nodes: usize) -> Result<(), OpenError> {
        Config::check(self, nodes).map_err(OpenError::Cache)
    }

    fn role(&self) -> Role {
        let is_lasting = self.write_back && !self.volatile;
        Role { caches: true, writes_back: self.write_back, is_lasting, ..Role::default() }
    }
}
