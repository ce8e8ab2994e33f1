//! Operations on extended attributes (RFC 8276): those of users, whose names go without `user.`.

use super::compound::{Compound, Done, Object, put_change_info};
use crate::status::Status;
use thruway_rpc::xdr::{Decoder, Encoder};
use thruway_vfs::SetXattr;

/// Longest name, `user.` not counted.
const NAME_MAX: usize = 255 - 5;
/// Longest value.
const VALUE_MAX: usize = 64 << 10;
/// Longest value that is decoded. A value above [`VALUE_MAX`] is an error of the call, not of its form.
const VALUE_DECODED_MAX: u32 = 1 << 20;

fn get_name<'b>(d: &mut Decoder<'b>) -> Done<&'b [u8]> {
    let name = d.opaque(1024)?;
    match name {
        _ if name.is_empty() || name.contains(&0) => Err(Status::INVAL.into()),
        _ if name.len() > NAME_MAX => Err(Status::NAMETOOLONG.into()),
        _ => Ok(name),
    }
}

impl Compound<'_> {
    pub(super) async fn get_xattr(&mut self, d: &mut Decoder<'_>, out: &mut Encoder) -> Done {
        let name = get_name(d)?;
        // The root has no attributes.
        let Object::File(target) = self.object()? else { return Err(Status::NOXATTR.into()) };
        self.call.begin_long_reply().await;
        out.opaque(&target.share.files.xattr(&target.who, &target.file, name).await?);
        Ok(())
    }

    pub(super) async fn set_xattr(&mut self, d: &mut Decoder<'_>, out: &mut Encoder) -> Done {
        let how = match d.u32()? {
            0 => SetXattr::Either,
            1 => SetXattr::Create,
            2 => SetXattr::Replace,
            _ => return Err(Status::BADXDR.into()),
        };
        let name = get_name(d)?;
        let value = d.opaque(VALUE_DECODED_MAX)?;
        if value.len() > VALUE_MAX {
            return Err(Status::XATTR2BIG.into());
        }
        self.change_xattr(name, Some((value, how)), out).await
    }

    pub(super) async fn remove_xattr(&mut self, d: &mut Decoder<'_>, out: &mut Encoder) -> Done {
        let name = get_name(d)?;
        self.change_xattr(name, None, out).await
    }

    async fn change_xattr(&self, name: &[u8], value: Option<(&[u8], SetXattr)>, out: &mut Encoder) -> Done {
        let target = self.writable()?;
        let _change = target.change(self.known_client()).await?;
        let before = target.attributes().await;
        target.share.files.set_xattr(&target.who, &target.file, name, value).await?;
        put_change_info(out, before.as_ref(), target.attributes().await.as_ref());
        Ok(())
    }

    pub(super) async fn list_xattrs(&mut self, d: &mut Decoder<'_>, out: &mut Encoder) -> Done {
        let (cookie, bytes) = (d.u64()?, d.u32()? as usize);
        let names = match self.object()? {
            Object::Root => Vec::new(),
            Object::File(target) => {
                self.call.begin_long_reply().await;
                target.share.files.xattrs(&target.who, &target.file).await?
            }
        };
        let begin = usize::try_from(cookie).ok().filter(|begin| *begin <= names.len()).ok_or(Status::BAD_COOKIE)?;
        // The cookie, the number of names, and whether that is all.
        let mut used = 8 + 4 + 4;
        let fitting = names[begin..].iter().take_while(|name| {
            used += 4 + name.len().next_multiple_of(4);
            used <= bytes
        });
        let end = begin + fitting.count();
        if end == begin && begin < names.len() {
            return Err(Status::TOOSMALL.into());
        }
        out.u64(end as u64);
        out.array(&names[begin..end], |out, name| out.opaque(name));
        out.bool(end == names.len());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_every_file_system_can_have() {
        let name_of = |name: &[u8]| {
            let mut out = Encoder::new();
            out.opaque(name);
            get_name(&mut Decoder::new(&out.to_bytes())).map(drop).map_err(|failure| failure.status)
        };
        assert_eq!((name_of(b"a"), name_of(&[b'a'; NAME_MAX])), (Ok(()), Ok(())));
        for wrong in [&b""[..], b"\0", b"a\0", b"a\0b"] {
            assert_eq!(name_of(wrong), Err(Status::INVAL));
        }
        assert_eq!(name_of(&[b'a'; NAME_MAX + 1]), Err(Status::NAMETOOLONG));
    }
}
