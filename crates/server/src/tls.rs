//! TLS servers, from certificates in files.

use crate::{Plain, slices};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, RwLock};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::StartHandshake;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::{Accepted, Acceptor, WebPkiClientVerifier};
use tokio_rustls::rustls::{RootCertStore, crypto};
use tokio_rustls::server::TlsStream;

/// Certificates or keys that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {reason}")]
#[non_exhaustive]
pub struct TlsError {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub reason: String,
}

/// A TLS server, whose certificates can be read again while it serves.
#[derive(Debug)]
pub struct TlsServer {
    files: Files,
    current: RwLock<Arc<ServerConfig>>,
}

/// PEM files: a certificate chain and its private key and, with `ca`, the authorities of which one must have signed a client's
/// certificate.
#[derive(Debug)]
struct Files {
    cert: PathBuf,
    key: PathBuf,
    ca: Option<PathBuf>,
}

impl TlsServer {
    /// Reads the certificates.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn new(cert: &Path, key: &Path, ca: Option<&Path>) -> Result<Arc<TlsServer>, TlsError> {
        let files = Files { cert: cert.into(), key: key.into(), ca: ca.map(Path::to_path_buf) };
        let current = RwLock::new(server(&files)?);
        Ok(Arc::new(TlsServer { files, current }))
    }

    /// Makes a TLS connection. The answer to a client's first message takes about a millisecond of the reactor, so it counts as a slice
    /// of the peer's host. Each read of that message counts as a unit.
    ///
    /// # Errors
    /// The system's and those of TLS.
    pub async fn accept(&self, mut plain: Plain) -> io::Result<TlsStream<Plain>> {
        let hello = read_hello(&mut plain).await?;
        slices::begin(slices::SLICE).await;
        let config = Arc::clone(&self.current.read().expect("no panics under the lock"));
        StartHandshake::from_parts(hello, plain).into_stream(config).await
    }

    /// Reads the certificates again, for connections from now on.
    ///
    /// # Errors
    /// [`TlsError`]; then everything stays as it was.
    pub fn reload(&self) -> Result<(), TlsError> {
        let read = server(&self.files)?;
        *self.current.write().expect("no panics under the lock") = read;
        Ok(())
    }
}

/// Reads a client's first message. Answers an invalid message with an alert.
async fn read_hello(plain: &mut Plain) -> io::Result<Accepted> {
    let mut acceptor = Acceptor::default();
    // On the heap: the memory of this future is part of each connection.
    let mut buffer = vec![0; slices::UNIT_BYTES];
    loop {
        slices::begin(1).await;
        let len = plain.read(&mut buffer).await?;
        if len == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut received = &buffer[..len];
        while !received.is_empty() {
            if acceptor.read_tls(&mut received)? == 0 {
                return Err(io::ErrorKind::InvalidData.into());
            }
            match acceptor.accept() {
                // The rest follows the first message.
                Ok(Some(_)) if !received.is_empty() => return Err(io::ErrorKind::InvalidData.into()),
                Ok(Some(hello)) => return Ok(hello),
                Ok(None) => {}
                Err((error, mut alert)) => {
                    let mut message = Vec::new();
                    alert.write_all(&mut message)?;
                    let _ = plain.write_all(&message).await;
                    return Err(io::Error::new(io::ErrorKind::InvalidData, error));
                }
            }
        }
    }
}

fn server(Files { cert, key, ca }: &Files) -> Result<Arc<ServerConfig>, TlsError> {
    let provider = Arc::new(crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .expect("ring has the cipher suites of TLS 1.2 and 1.3");
    let builder = match ca {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for certificate in certificates(path)? {
                roots.add(certificate).map_err(|e| unusable(path, e))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
            builder.with_client_cert_verifier(verifier.build().map_err(|e| unusable(path, e))?)
        }
    };
    let chain = certificates(cert)?;
    let secret = PrivateKeyDer::from_pem_file(key).map_err(|e| unusable(key, e))?;
    let config = builder.with_single_cert(chain, secret).map_err(|e| unusable(cert, e))?;
    Ok(Arc::new(config))
}

fn unusable(path: &Path, reason: impl ToString) -> TlsError {
    TlsError { path: path.to_owned(), reason: reason.to_string() }
}

/// The DNS names among the subject's alternative names of the client's certificate; none if it has shown none.
pub fn names<S>(stream: &tokio_rustls::server::TlsStream<S>) -> Vec<String> {
    let (_, connection) = stream.get_ref();
    let certificate = connection.peer_certificates().and_then(|chain| chain.first());
    let parsed = certificate.and_then(|certificate| webpki::EndEntityCert::try_from(certificate).ok());
    parsed.map(|certificate| certificate.valid_dns_names().map(str::to_owned).collect()).unwrap_or_default()
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let certificates = CertificateDer::pem_file_iter(path).map_err(|e| unusable(path, e))?;
    match certificates.collect::<Result<Vec<_>, _>>() {
        Ok(found) if found.is_empty() => Err(unusable(path, "no certificate in it")),
        Ok(found) => Ok(found),
        Err(e) => Err(unusable(path, e)),
    }
}
