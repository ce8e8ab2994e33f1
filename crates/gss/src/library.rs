//! MIT Kerberos's GSS-API library (RFC 2744), found at run time.

use crate::GssError;
use libloading::os::unix::{Library as File, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

/// The library's file.
const FILE: &str = "libgssapi_krb5.so.2";

pub(crate) type Name = *mut c_void;
pub(crate) type Cred = *mut c_void;
pub(crate) type Ctx = *mut c_void;

/// `gss_buffer_desc`
#[repr(C)]
pub(crate) struct BufferDesc {
    pub(crate) length: usize,
    pub(crate) value: *mut c_void,
}

/// `gss_OID_desc`
#[repr(C)]
pub(crate) struct OidDesc {
    pub(crate) length: u32,
    pub(crate) elements: *mut c_void,
}

/// `gss_OID_set_desc`
#[repr(C)]
pub(crate) struct OidSetDesc {
    pub(crate) count: usize,
    pub(crate) elements: *mut OidDesc,
}

/// `gss_key_value_element_desc`
#[repr(C)]
pub(crate) struct KeyValue {
    pub(crate) key: *const c_char,
    pub(crate) value: *const c_char,
}

/// `gss_key_value_set_desc`
#[repr(C)]
pub(crate) struct KeyValueSet {
    pub(crate) count: u32,
    pub(crate) elements: *const KeyValue,
}

macro_rules! library {
    ($($name:ident: fn($($arg:ty),*);)*) => {
        /// The functions that are used. Each returns a major status.
        pub(crate) struct Library {
            $(pub(crate) $name: unsafe extern "C" fn($($arg),*) -> u32,)*
            _file: File,
        }

        impl Library {
            fn open() -> Result<Library, GssError> {
                // SAFETY: loads a library of the system; its constructors are MIT Kerberos's. It is never unloaded.
                let file = unsafe { File::open(Some(FILE), RTLD_NOW | RTLD_LOCAL) };
                let file = file.map_err(|e| GssError::Library(format!("{FILE} cannot be loaded ({e}): install libgssapi-krb5-2")))?;
                Ok(Library {
                    $($name: {
                        // SAFETY: the symbol is the function that the library's header declares so.
                        let found = unsafe { file.get::<unsafe extern "C" fn($($arg),*) -> u32>(stringify!($name).as_bytes()) };
                        *found.map_err(|e| GssError::Library(format!("{FILE} is too old: {e}")))?
                    },)*
                    _file: file,
                })
            }
        }
    };
}

type Minor = *mut u32;
type Buffer = *mut BufferDesc;
type Oid = *mut OidDesc;

library! {
    gss_acquire_cred_from: fn(Minor, Name, u32, *const OidSetDesc, c_int, *const KeyValueSet, *mut Cred, *mut c_void, *mut u32);
    gss_accept_sec_context: fn(Minor, *mut Ctx, Cred, Buffer, *mut c_void, *mut Name, *mut Oid, Buffer, *mut u32, *mut u32, *mut Cred);
    gss_init_sec_context: fn(Minor, Cred, *mut Ctx, Name, Oid, u32, u32, *mut c_void, Buffer, *mut Oid, Buffer, *mut u32, *mut u32);
    gss_delete_sec_context: fn(Minor, *mut Ctx, Buffer);
    gss_get_mic: fn(Minor, Ctx, u32, Buffer, Buffer);
    gss_verify_mic: fn(Minor, Ctx, Buffer, Buffer, *mut u32);
    gss_wrap: fn(Minor, Ctx, c_int, u32, Buffer, *mut c_int, Buffer);
    gss_unwrap: fn(Minor, Ctx, Buffer, Buffer, *mut c_int, *mut u32);
    gss_import_name: fn(Minor, Buffer, Oid, *mut Name);
    gss_display_name: fn(Minor, Name, Buffer, *mut Oid);
    gss_localname: fn(Minor, Name, *const OidDesc, Buffer);
    gss_display_status: fn(Minor, u32, c_int, *const OidDesc, *mut u32, Buffer);
    gss_release_name: fn(Minor, *mut Name);
    gss_release_cred: fn(Minor, *mut Cred);
    gss_release_buffer: fn(Minor, Buffer);
}

/// The library, loaded at the first call.
pub(crate) fn library() -> Result<&'static Library, GssError> {
    static LIBRARY: OnceLock<Result<Library, GssError>> = OnceLock::new();
    LIBRARY.get_or_init(Library::open).as_ref().map_err(Clone::clone)
}

impl BufferDesc {
    /// What the library is to fill.
    pub(crate) const EMPTY: BufferDesc = BufferDesc { length: 0, value: null_mut() };

    /// Bytes that the library reads.
    pub(crate) fn over(bytes: &[u8]) -> BufferDesc {
        BufferDesc { length: bytes.len(), value: bytes.as_ptr().cast_mut().cast() }
    }
}

/// The mechanism Kerberos 5, 1.2.840.113554.1.2.2 (RFC 4121).
const KRB5: &[u8; 9] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x12, 0x01, 0x02, 0x02];
/// Names of services, 1.2.840.113554.1.2.1.4 (`GSS_C_NT_HOSTBASED_SERVICE`, RFC 2744, section 4).
const HOST_BASED: &[u8; 10] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x12, 0x01, 0x02, 0x01, 0x04];

fn oid(bytes: &'static [u8]) -> OidDesc {
    OidDesc { length: bytes.len() as u32, elements: bytes.as_ptr().cast_mut().cast() }
}

/// The mechanism Kerberos 5.
pub(crate) fn krb5() -> OidDesc {
    oid(KRB5)
}

/// The kind of names of services.
pub(crate) fn host_based() -> OidDesc {
    oid(HOST_BASED)
}
