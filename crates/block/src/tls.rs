//! TLS: certificates from files.

use std::path::Path;
use std::sync::Arc;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig, crypto};

/// A server that shows the certificates of one file, proves them by the key of another and, if `ca` is given,
/// only serves clients with a certificate signed by one of those in it.
///
/// # Errors
/// A sentence that names the file and what is wrong with it.
pub fn server(cert: &Path, key: &Path, ca: Option<&Path>) -> Result<Arc<ServerConfig>, String> {
    let provider = Arc::new(crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|e| format!("TLS: {e}"))?;
    let builder = match ca {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for certificate in certificates(path)? {
                roots.add(certificate).map_err(|e| format!("{}: {e}", path.display()))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                .build()
                .map_err(|e| format!("{}: {e}", path.display()))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let chain = certificates(cert)?;
    let secret = PrivateKeyDer::from_pem_file(key).map_err(|e| format!("{}: {e}", key.display()))?;
    let config = builder.with_single_cert(chain, secret).map_err(|e| format!("{}: {e}", cert.display()))?;
    Ok(Arc::new(config))
}

/// What the certificate that a client has shown says that it is called (the DNS names among its subject's alternative
/// names).
pub(crate) fn names<S>(stream: &tokio_rustls::server::TlsStream<S>) -> Vec<String> {
    let (_, connection) = stream.get_ref();
    let certificate = connection.peer_certificates().and_then(|chain| chain.first());
    let parsed = certificate.and_then(|certificate| webpki::EndEntityCert::try_from(certificate).ok());
    parsed.map(|certificate| certificate.valid_dns_names().map(str::to_owned).collect()).unwrap_or_default()
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let fail = |e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
    let found: Result<Vec<_>, _> = CertificateDer::pem_file_iter(path).map_err(|e| fail(&e))?.collect();
    match found {
        Ok(found) if found.is_empty() => Err(fail(&"no certificate in it")),
        Ok(found) => Ok(found),
        Err(e) => Err(fail(&e)),
    }
}
