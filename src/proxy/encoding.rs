//! Answers that come compressed although `identity` was asked for.
//!
//! Some gateways compress whatever they are told. What they send is unpacked, so
//! that it can be read and cut, and the client gets it plain.

use std::io::{self, Write};

use axum::http::header::{CONTENT_ENCODING, HeaderMap};
use bytes::Bytes;
use flate2::write::{DeflateDecoder, MultiGzDecoder, ZlibDecoder};
use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};

/// How the bytes of an answer are coded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Coding {
    /// Not at all.
    Plain,
    /// As gzip does.
    Gzip,
    /// As zlib does, with or without its frame.
    Deflate,
    /// In a way that cannot be read here.
    Foreign,
}

impl Coding {
    /// Reads an answer's headers.
    pub(super) fn of(headers: &HeaderMap) -> Self {
        let mut codings = Vec::new();
        for value in headers.get_all(CONTENT_ENCODING) {
            let value = String::from_utf8_lossy(value.as_bytes()).to_ascii_lowercase();
            codings.extend(value.split(',').map(|coding| coding.trim().to_owned()));
        }
        codings.retain(|coding| !coding.is_empty() && coding != "identity");
        match codings.as_slice() {
            [] => Self::Plain,
            [only] if only == "gzip" || only == "x-gzip" => Self::Gzip,
            [only] if only == "deflate" => Self::Deflate,
            _ => Self::Foreign,
        }
    }
}

/// Unpacks bytes as they come.
enum Decoder {
    Gzip(MultiGzDecoder<Vec<u8>>),
    /// Deflate before its first byte: some servers leave the frame of zlib out.
    Deflate,
    Zlib(ZlibDecoder<Vec<u8>>),
    Raw(DeflateDecoder<Vec<u8>>),
}

impl Decoder {
    fn of(coding: Coding) -> Option<Self> {
        match coding {
            Coding::Gzip => Some(Self::Gzip(MultiGzDecoder::new(Vec::new()))),
            Coding::Deflate => Some(Self::Deflate),
            Coding::Plain | Coding::Foreign => None,
        }
    }

    /// Takes bytes; returns all that can be known of them by now: a token must
    /// not wait for the next one.
    fn push(&mut self, bytes: &[u8]) -> io::Result<Bytes> {
        if let (Self::Deflate, Some(first)) = (&self, bytes.first()) {
            *self = match first & 0x0f {
                8 => Self::Zlib(ZlibDecoder::new(Vec::new())),
                _ => Self::Raw(DeflateDecoder::new(Vec::new())),
            };
        }
        let plain = match self {
            Self::Gzip(decoder) => unpack(decoder, bytes)?.get_mut(),
            Self::Zlib(decoder) => unpack(decoder, bytes)?.get_mut(),
            Self::Raw(decoder) => unpack(decoder, bytes)?.get_mut(),
            Self::Deflate => return Ok(Bytes::new()),
        };
        Ok(std::mem::take(plain).into())
    }

    /// Returns the rest. Bytes that broke off are an error.
    fn finish(self) -> io::Result<Bytes> {
        let rest = match self {
            Self::Gzip(decoder) => decoder.finish()?,
            Self::Zlib(decoder) => decoder.finish()?,
            Self::Raw(decoder) => decoder.finish()?,
            Self::Deflate => Vec::new(),
        };
        Ok(rest.into())
    }
}

fn unpack<'a, D: Write>(decoder: &'a mut D, bytes: &[u8]) -> io::Result<&'a mut D> {
    decoder.write_all(bytes)?;
    decoder.flush()?;
    Ok(decoder)
}

/// Returns the plain bytes of an answer as they come.
pub(super) fn plain(
    answer: reqwest::Response,
    coding: Coding,
) -> BoxStream<'static, io::Result<Bytes>> {
    let bytes = answer.bytes_stream().map(|piece| piece.map_err(io::Error::other));
    match Decoder::of(coding) {
        None => bytes.boxed(),
        Some(decoder) => unpacked(bytes.boxed(), decoder),
    }
}

/// Packed bytes that are unpacked at once. They grow up to a thousandfold, so
/// that a small packet could become more than there is memory.
const SLICE: usize = 4 << 10;

fn unpacked(
    packed: BoxStream<'static, io::Result<Bytes>>,
    decoder: Decoder,
) -> BoxStream<'static, io::Result<Bytes>> {
    let start = Some((packed, decoder, Bytes::new()));
    let pieces = stream::unfold(start, |state| async {
        let (mut packed, mut decoder, mut waiting) = state?;
        loop {
            if waiting.is_empty() {
                waiting = match packed.next().await {
                    Some(Ok(bytes)) => bytes,
                    Some(Err(error)) => return Some((Err(error), None)),
                    None => {
                        let rest = decoder.finish();
                        return rest.map_or_else(
                            |error| Some((Err(error), None)),
                            |rest| (!rest.is_empty()).then_some((Ok(rest), None)),
                        );
                    }
                };
            } else {
                // Other chats have their turn between two slices.
                tokio::task::yield_now().await;
            }
            let slice = waiting.split_to(waiting.len().min(SLICE));
            match decoder.push(&slice) {
                Ok(plain) if plain.is_empty() => {}
                Ok(plain) => return Some((Ok(plain), Some((packed, decoder, waiting)))),
                Err(error) => return Some((Err(error), None)),
            }
        }
    });
    pieces.boxed()
}
