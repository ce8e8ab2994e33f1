//! Entry points for the fuzz targets; not part of the interface.

/// Decodes a request or reply frame.
pub fn mpa_frame(data: &[u8]) {
    let Some((&which, rest)) = data.split_first() else { return };
    if let Ok(Some((frame, used))) = super::mpa::Frame::decode(rest, which & 1 != 0) {
        assert!(used <= rest.len());
        let again = frame.encode();
        assert_eq!(super::mpa::Frame::decode(&again, frame.reply), Ok(Some((frame, again.len()))));
    }
}
