//! Kerberos 5 by the GSS-API (RFC 2743, RFC 2744, RFC 4121), as far as RPCSEC_GSS (RFC 2203) needs it.
//!
//! - [`Acceptor`]: a service with the keys of a keytab, which accepts contexts of clients.
//! - [`initiate`]: a client makes a context with its tickets.
//! - [`Context`]: what both have then; it signs, checks, seals and opens messages.
//!
//! The library (MIT Kerberos's) is loaded when it is used first. Nothing of it is needed for building.

mod library;

use library::{BufferDesc, Cred, Ctx, KeyValue, KeyValueSet, Name, OidSetDesc, host_based, krb5, library};
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Longest token of a context, in bytes: tickets with the groups of a big directory among them.
pub const TOKEN_MAX: usize = 64 << 10;

/// `GSS_S_COMPLETE`
pub const COMPLETE: u32 = 0;
/// `GSS_S_CONTINUE_NEEDED`
const CONTINUE_NEEDED: u32 = 1;
/// `GSS_S_FAILURE`
pub const FAILURE: u32 = 13 << 16;
/// The bits of a status that say that the call has failed.
const ERRORS: u32 = 0xffff_0000;

/// Why something was not done.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GssError {
    /// The library cannot be used.
    #[error("{0}")]
    Library(String),
    /// The library says so.
    #[error("{doing}: {text}")]
    Status {
        /// What was being done.
        doing: &'static str,
        /// What the library says.
        text: String,
        /// Major status.
        major: u32,
        /// Minor status.
        minor: u32,
    },
    /// A name has a zero byte.
    #[error("'{0}' has a zero byte")]
    ZeroByte(String),
}

impl GssError {
    /// The major and the minor status, for a peer.
    pub fn status(&self) -> (u32, u32) {
        match self {
            GssError::Status { major, minor, .. } => (*major, *minor),
            _ => (FAILURE, 0),
        }
    }
}

/// Result of a call.
pub type Result<T> = std::result::Result<T, GssError>;

/// What the library has allocated.
struct Allocated(BufferDesc);

impl Allocated {
    const EMPTY: Allocated = Allocated(BufferDesc::EMPTY);

    fn bytes(&self) -> &[u8] {
        if self.0.value.is_null() {
            return &[];
        }
        // SAFETY: the library has filled the buffer, which is ours until it is released.
        unsafe { std::slice::from_raw_parts(self.0.value.cast(), self.0.length) }
    }
}

impl Drop for Allocated {
    fn drop(&mut self) {
        if let Ok(library) = library()
            && !self.0.value.is_null()
        {
            // SAFETY: the library has filled the buffer, and it is released once.
            unsafe { (library.gss_release_buffer)(&mut 0, &mut self.0) };
        }
    }
}

/// A name of the library's.
struct OwnedName(Name);

impl OwnedName {
    /// The name of a service: `nfs`, or `nfs@host`.
    fn of_service(service: &str) -> Result<OwnedName> {
        let (library, mut name) = (library()?, OwnedName(null_mut()));
        // SAFETY: the buffer and the OID are valid for the call; the library fills the name.
        check("naming a service", |minor| unsafe {
            (library.gss_import_name)(minor, &mut BufferDesc::over(service.as_bytes()), &mut host_based(), &mut name.0)
        })?;
        Ok(name)
    }

    /// As people write it: `alice@EXAMPLE.ORG`.
    fn display(&self) -> Result<String> {
        let (library, mut text) = (library()?, Allocated::EMPTY);
        // SAFETY: the name is the library's, and the library fills the buffer; the kind of the name is not asked for.
        check("reading a name", |minor| unsafe { (library.gss_display_name)(minor, self.0, &mut text.0, null_mut()) })?;
        Ok(String::from_utf8_lossy(text.bytes()).into_owned())
    }

    /// The local user that the library's configuration (`auth_to_local`) makes of it, if any.
    fn local(&self) -> Option<String> {
        let (library, mut text) = (library().ok()?, Allocated::EMPTY);
        // SAFETY: as above.
        let major = unsafe { (library.gss_localname)(&mut 0, self.0, &krb5(), &mut text.0) };
        (major & ERRORS == 0).then(|| String::from_utf8(text.bytes().to_vec()).ok()).flatten()
    }
}

impl Drop for OwnedName {
    fn drop(&mut self) {
        if let Ok(library) = library()
            && !self.0.is_null()
        {
            // SAFETY: the library has made the name, and it is released once.
            unsafe { (library.gss_release_name)(&mut 0, &mut self.0) };
        }
    }
}

/// The texts of a status.
fn describe(major: u32, minor: u32) -> String {
    const MAJOR: i32 = 1;
    const MINOR: i32 = 2;
    let Ok(library) = library() else { return format!("status {major:#x}") };
    let text = |status, kind| {
        let (mut text, mut context) = (Allocated::EMPTY, 0);
        // SAFETY: the OID is valid for the call; the library fills the buffer.
        unsafe { (library.gss_display_status)(&mut 0, status, kind, &krb5(), &mut context, &mut text.0) };
        String::from_utf8_lossy(text.bytes()).into_owned()
    };
    // The major status of most failures says only that they are some; the minor one says which.
    match (minor, text(minor, MINOR)) {
        (0, _) => text(major, MAJOR),
        (_, text) if text.is_empty() => format!("status {major:#x}, {minor}"),
        (_, text) => text,
    }
}

/// Calls the library; its major status, if that is no error.
fn check(doing: &'static str, call: impl FnOnce(*mut u32) -> u32) -> Result<u32> {
    let mut minor = 0;
    let major = call(&mut minor);
    if major & ERRORS == 0 {
        return Ok(major);
    }
    Err(GssError::Status { doing, text: describe(major, minor), major, minor })
}

fn c_string(bytes: &[u8]) -> Result<CString> {
    CString::new(bytes).map_err(|_| GssError::ZeroByte(String::from_utf8_lossy(bytes).into_owned()))
}

/// A service with its keys.
pub struct Acceptor {
    cred: Cred,
}

// SAFETY: the library locks a credential while it uses it, and any thread may.
unsafe impl Send for Acceptor {}
// SAFETY: as above.
unsafe impl Sync for Acceptor {}

/// A client that has proved who it is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Peer {
    /// Its principal: `alice@EXAMPLE.ORG`.
    pub principal: String,
    /// The user of this host that it counts as, by `auth_to_local` of `krb5.conf`.
    pub local_user: Option<String>,
}

/// A context that has been accepted.
pub struct Accepted {
    /// The context.
    pub context: Context,
    /// Whose it is.
    pub peer: Peer,
    /// What the client is to be sent.
    pub token: Vec<u8>,
}

impl Acceptor {
    /// The service of this name (`nfs`) with those keys of a keytab that are its own, whatever its host is called there.
    ///
    /// # Errors
    /// If the library cannot be loaded, or the keytab cannot be read or has no such key.
    pub fn new(service: &str, keytab: &Path) -> Result<Acceptor> {
        const ACCEPT: i32 = 2;
        let library = library()?;
        let name = OwnedName::of_service(service)?;
        let (key, keytab) = (c_string(b"keytab")?, c_string(&[b"FILE:", keytab.as_os_str().as_bytes()].concat())?);
        let keytab = [KeyValue { key: key.as_ptr(), value: keytab.as_ptr() }];
        let store = KeyValueSet { count: 1, elements: keytab.as_ptr() };
        let mut mechanism = krb5();
        let mechanisms = OidSetDesc { count: 1, elements: &mut mechanism };
        let mut cred = null_mut();
        // SAFETY: all pointers are valid for the call; the library fills the credential. What else it could say is not asked for.
        check("reading the keytab", |minor| unsafe {
            (library.gss_acquire_cred_from)(
                minor,
                name.0,
                u32::MAX,
                &mechanisms,
                ACCEPT,
                &store,
                &mut cred,
                null_mut(),
                null_mut(),
            )
        })?;
        Ok(Acceptor { cred })
    }

    /// Accepts the context whose first token this is. Reads files; a context of Kerberos needs no second token.
    ///
    /// # Errors
    /// If the token does not prove who the client is.
    pub fn accept(&self, token: &[u8]) -> Result<Accepted> {
        let library = library()?;
        let (mut context, mut name, mut reply) = (OwnedContext(null_mut()), OwnedName(null_mut()), Allocated::EMPTY);
        let mut seconds = 0;
        // SAFETY: all pointers are valid for the call; the library fills the context, the name and the reply. Channel bindings, the
        // mechanism, flags and a delegated credential are not asked for.
        let major = check("accepting a context", |minor| unsafe {
            (library.gss_accept_sec_context)(
                minor,
                &mut context.0,
                self.cred,
                &mut BufferDesc::over(token),
                null_mut(),
                &mut name.0,
                null_mut(),
                &mut reply.0,
                null_mut(),
                &mut seconds,
                null_mut(),
            )
        })?;
        if major & CONTINUE_NEEDED != 0 {
            let text = "a context that needs more than one token".into();
            return Err(GssError::Status { doing: "accepting a context", text, major: FAILURE, minor: 0 });
        }
        let peer = Peer { principal: name.display()?, local_user: name.local() };
        Ok(Accepted { context: Context::new(context, seconds), peer, token: reply.bytes().to_vec() })
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        if let Ok(library) = library() {
            // SAFETY: the library has made the credential, and it is released once.
            unsafe { (library.gss_release_cred)(&mut 0, &mut self.cred) };
        }
    }
}

struct OwnedContext(Ctx);

// SAFETY: a context is not bound to a thread; it is used by one at a time, under the lock in `Context`.
unsafe impl Send for OwnedContext {}

impl Drop for OwnedContext {
    fn drop(&mut self) {
        if let Ok(library) = library()
            && !self.0.is_null()
        {
            // SAFETY: the library has made the context, and it is deleted once. There is no token about that.
            unsafe { (library.gss_delete_sec_context)(&mut 0, &mut self.0, null_mut()) };
        }
    }
}

/// The keys that a client and a service share for a while.
pub struct Context {
    context: Mutex<OwnedContext>,
    /// When the client's ticket ends; never, if that is farther away than the clock reaches.
    end: Option<Instant>,
}

impl Context {
    fn new(context: OwnedContext, seconds: u32) -> Context {
        let end = Instant::now().checked_add(Duration::from_secs(seconds.into()));
        Context { context: Mutex::new(context), end }
    }

    fn lock(&self) -> MutexGuard<'_, OwnedContext> {
        self.context.lock().expect("no panics under the lock")
    }

    /// Whether the ticket that it was made with has ended.
    pub fn has_ended(&self) -> bool {
        self.end.is_some_and(|end| end <= Instant::now())
    }

    /// A code for a message, which only the two ends can make.
    ///
    /// # Errors
    /// The library's.
    pub fn sign(&self, message: &[u8]) -> Result<Vec<u8>> {
        let (library, context, mut code) = (library()?, self.lock(), Allocated::EMPTY);
        // SAFETY: the context is ours and locked, the message is valid for the call, and the library fills the code.
        check("signing a message", |minor| unsafe {
            (library.gss_get_mic)(minor, context.0, 0, &mut BufferDesc::over(message), &mut code.0)
        })?;
        Ok(code.bytes().to_vec())
    }

    /// Whether a code is that of a message.
    ///
    /// # Errors
    /// If it is not.
    pub fn verify(&self, message: &[u8], code: &[u8]) -> Result<()> {
        let (library, context) = (library()?, self.lock());
        // SAFETY: the context is ours and locked, and the bytes are valid for the call.
        check("checking a message", |minor| unsafe {
            let (mut message, mut code) = (BufferDesc::over(message), BufferDesc::over(code));
            (library.gss_verify_mic)(minor, context.0, &mut message, &mut code, null_mut())
        })?;
        Ok(())
    }

    /// A message that only the two ends can read or make.
    ///
    /// # Errors
    /// The library's, or if the context cannot encrypt.
    pub fn seal(&self, message: &[u8]) -> Result<Vec<u8>> {
        let (library, context, mut sealed) = (library()?, self.lock(), Allocated::EMPTY);
        let mut is_encrypted = 0;
        // SAFETY: the context is ours and locked, the message is valid for the call, and the library fills the rest.
        check("encrypting a message", |minor| unsafe {
            let mut message = BufferDesc::over(message);
            (library.gss_wrap)(minor, context.0, 1, 0, &mut message, &mut is_encrypted, &mut sealed.0)
        })?;
        encrypted("encrypting a message", is_encrypted)?;
        Ok(sealed.bytes().to_vec())
    }

    /// The message that was sealed.
    ///
    /// # Errors
    /// If it was not sealed with this context.
    pub fn open(&self, sealed: &[u8]) -> Result<Vec<u8>> {
        let (library, context, mut message) = (library()?, self.lock(), Allocated::EMPTY);
        let mut is_encrypted = 0;
        // SAFETY: the context is ours and locked, the bytes are valid for the call, and the library fills the rest.
        check("decrypting a message", |minor| unsafe {
            let mut sealed = BufferDesc::over(sealed);
            (library.gss_unwrap)(minor, context.0, &mut sealed, &mut message.0, &mut is_encrypted, null_mut())
        })?;
        encrypted("decrypting a message", is_encrypted)?;
        Ok(message.bytes().to_vec())
    }
}

/// A message may have been signed only, which is less than was asked for.
fn encrypted(doing: &'static str, is_encrypted: i32) -> Result<()> {
    if is_encrypted != 0 {
        return Ok(());
    }
    Err(GssError::Status { doing, text: "it is not encrypted".into(), major: FAILURE, minor: 0 })
}

/// A context that a client is making.
pub struct Initiator {
    context: OwnedContext,
    service: OwnedName,
}

// SAFETY: neither the context nor the name is bound to a thread, and one at a time uses them.
unsafe impl Send for Initiator {}

/// Begins a context with a service (`nfs@host`), with the tickets of the user whom this process runs as, or of `KRB5CCNAME`. What
/// the service is to be sent. May ask a key distribution centre.
///
/// # Errors
/// If the library cannot be loaded, or there is no ticket for the service.
pub fn initiate(service: &str) -> Result<(Initiator, Vec<u8>)> {
    let mut initiator = Initiator { context: OwnedContext(null_mut()), service: OwnedName::of_service(service)? };
    let (_, _, token) = initiator.step(&[])?;
    Ok((initiator, token))
}

impl Initiator {
    fn step(&mut self, token: &[u8]) -> Result<(u32, u32, Vec<u8>)> {
        const MUTUAL: u32 = 2;
        let (library, mut next, mut seconds) = (library()?, Allocated::EMPTY, 0);
        // SAFETY: all pointers are valid for the call; the library fills the context and the token. Of a null credential it takes the
        // default one; the mechanism and flags are not asked for.
        let major = check("making a context", |minor| unsafe {
            (library.gss_init_sec_context)(
                minor,
                null_mut(),
                &mut self.context.0,
                self.service.0,
                &mut krb5(),
                MUTUAL,
                0,
                null_mut(),
                &mut BufferDesc::over(token),
                null_mut(),
                &mut next.0,
                null_mut(),
                &mut seconds,
            )
        })?;
        Ok((major, seconds, next.bytes().to_vec()))
    }

    /// Ends with what the service has answered.
    ///
    /// # Errors
    /// If the service has not proved that it is the one.
    pub fn finish(mut self, token: &[u8]) -> Result<Context> {
        let (major, seconds, _) = self.step(token)?;
        if major & CONTINUE_NEEDED != 0 {
            let text = "the service wants more than one token".into();
            return Err(GssError::Status { doing: "making a context", text, major: FAILURE, minor: 0 });
        }
        let Initiator { context, .. } = self;
        Ok(Context::new(context, seconds))
    }
}
