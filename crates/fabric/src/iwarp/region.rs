//! Registered memory.

use crate::provider::RegionOps;
use std::sync::Arc;
use thruway_iwarp::regions::{Region, RegionTable};
use thruway_rdma_types::{Access, Result};

/// A registered region, or a part of one.
pub(super) struct RegionHandle {
    pub(super) table: Arc<RegionTable>,
    pub(super) region: Arc<Region>,
}

impl RegionOps for RegionHandle {
    fn key(&self) -> u32 {
        self.region.stag()
    }

    fn base(&self) -> u64 {
        self.region.base()
    }

    fn len(&self) -> usize {
        self.region.len()
    }

    fn is_valid(&self) -> bool {
        self.region.is_valid()
    }

    fn part(&self, offset: usize, len: usize, access: Access) -> Result<Arc<dyn RegionOps>> {
        let region = self.table.bind(None, &self.region, offset, len, access)?;
        Ok(Arc::new(RegionHandle { table: Arc::clone(&self.table), region }))
    }

    fn deregister(&self) {
        self.table.deregister(&self.region);
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}
