//! rdma-core's libraries, found at run time, so that one program runs where they are and where
//! they are not.

use super::abi::*;
use libc::{c_char, c_int, c_uint, c_void};
use libloading::os::unix::{Library as File, RTLD_GLOBAL, RTLD_NOW};
use std::sync::OnceLock;

macro_rules! library {
    ($($lib:literal { $($name:ident: fn($($arg:ty),*) $(-> $ret:ty)?;)* })*) => {
        /// The functions of rdma-core that are used.
        pub(super) struct Library {
            $($(pub(super) $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*)*
        }

        impl Library {
            fn open() -> Result<Library, LibraryError> {
                Ok(Library {
                    $($($name: {
                        let symbol = symbol($lib, stringify!($name))?;
                        // SAFETY: the symbol is the function that the library's header declares so.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) $(-> $ret)?>(symbol) }
                    },)*)*
                })
            }
        }
    };
}

library! {
    "libibverbs.so.1" {
        ibv_query_device: fn(*mut ibv_context, *mut ibv_device_attr) -> c_int;
        ibv_get_device_name: fn(*mut c_void) -> *const c_char;
        ibv_alloc_pd: fn(*mut ibv_context) -> *mut ibv_pd;
        ibv_dealloc_pd: fn(*mut ibv_pd) -> c_int;
        ibv_reg_mr_iova2: fn(*mut ibv_pd, *mut c_void, usize, u64, c_uint) -> *mut ibv_mr;
        ibv_dereg_mr: fn(*mut ibv_mr) -> c_int;
        ibv_create_comp_channel: fn(*mut ibv_context) -> *mut ibv_comp_channel;
        ibv_destroy_comp_channel: fn(*mut ibv_comp_channel) -> c_int;
        ibv_create_cq: fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
        ibv_destroy_cq: fn(*mut ibv_cq) -> c_int;
        ibv_get_cq_event: fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
        ibv_ack_cq_events: fn(*mut ibv_cq, c_uint);
        ibv_create_srq: fn(*mut ibv_pd, *mut ibv_srq_init_attr) -> *mut ibv_srq;
        ibv_destroy_srq: fn(*mut ibv_srq) -> c_int;
        ibv_create_qp: fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
        ibv_modify_qp: fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
        ibv_destroy_qp: fn(*mut ibv_qp) -> c_int;
        ibv_get_async_event: fn(*mut ibv_context, *mut ibv_async_event) -> c_int;
        ibv_ack_async_event: fn(*mut ibv_async_event);
        ibv_event_type_str: fn(c_int) -> *const c_char;
        ibv_wc_status_str: fn(c_int) -> *const c_char;
    }
    "librdmacm.so.1" {
        rdma_get_devices: fn(*mut c_int) -> *mut *mut ibv_context;
        rdma_free_devices: fn(*mut *mut ibv_context);
        rdma_create_event_channel: fn() -> *mut rdma_event_channel;
        rdma_destroy_event_channel: fn(*mut rdma_event_channel);
        rdma_create_id: fn(*mut rdma_event_channel, *mut *mut rdma_cm_id, *mut c_void, c_int) -> c_int;
        rdma_destroy_id: fn(*mut rdma_cm_id) -> c_int;
        rdma_bind_addr: fn(*mut rdma_cm_id, *const libc::sockaddr) -> c_int;
        rdma_listen: fn(*mut rdma_cm_id, c_int) -> c_int;
        rdma_resolve_addr: fn(*mut rdma_cm_id, *const libc::sockaddr, *const libc::sockaddr, c_int) -> c_int;
        rdma_resolve_route: fn(*mut rdma_cm_id, c_int) -> c_int;
        rdma_connect: fn(*mut rdma_cm_id, *mut rdma_conn_param) -> c_int;
        rdma_accept: fn(*mut rdma_cm_id, *mut rdma_conn_param) -> c_int;
        rdma_reject: fn(*mut rdma_cm_id, *const c_void, u8) -> c_int;
        rdma_disconnect: fn(*mut rdma_cm_id) -> c_int;
        rdma_migrate_id: fn(*mut rdma_cm_id, *mut rdma_event_channel) -> c_int;
        rdma_get_cm_event: fn(*mut rdma_event_channel, *mut *mut rdma_cm_event) -> c_int;
        rdma_ack_cm_event: fn(*mut rdma_cm_event) -> c_int;
    }
}

/// rdma-core cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LibraryError {
    /// A library is not there.
    #[error("{library} is not installed ({reason}); it comes with rdma-core")]
    Missing {
        /// Its file.
        library: &'static str,
        /// What the dynamic linker says.
        reason: String,
    },
    /// A library lacks a function.
    #[error("{library} is too old: it lacks {function}")]
    TooOld {
        /// Its file.
        library: &'static str,
        /// The function.
        function: &'static str,
    },
}

fn symbol(library: &'static str, name: &'static str) -> Result<*mut c_void, LibraryError> {
    // SAFETY: loads a system library; its constructors are rdma-core's.
    let file = unsafe { File::open(Some(library), RTLD_NOW | RTLD_GLOBAL) };
    let file = file.map_err(|error| LibraryError::Missing { library, reason: error.to_string() })?;
    // SAFETY: that the symbol is a function is known to the caller, who gives it its type; here it is an address.
    let found = unsafe { file.get::<*mut c_void>(name.as_bytes()) }.map(|symbol| symbol.into_raw());
    // Never unloaded.
    let _ = file.into_raw();
    found.map_err(|_| LibraryError::TooOld { library, function: name })
}

/// The libraries, loaded at the first call.
///
/// # Errors
/// [`LibraryError`].
pub(super) fn library() -> Result<&'static Library, LibraryError> {
    static LIBRARY: OnceLock<Result<Library, LibraryError>> = OnceLock::new();
    LIBRARY.get_or_init(Library::open).as_ref().map_err(Clone::clone)
}
